"""Connections to workers that cannot be reached from outside. Torch-free; used by all processes of the data plane.

    frames       what goes through a tunnel
    core         a relay's decisions: who is connected to whom, credit, turns, its cap (pure)
    server       a relay's port around the core;  process, __main__: the relay as a child process;  dial_back
    tunnel       a tunnel as its user holds it
    dialer       who opens connections: a local port per (relay, worker)
    listener     who is reached: tunnels to two relays at once
    paths        a channel to a peer by whichever way answers first, direct or relayed

    engine A --TCP--> local port ==tunnel==> relay ==tunnel==> supervisor of B --TCP--> data port of engine B
       \\______________________________ one TLS connection, mutual ______________________________/

A relay sees ids, byte counts and ciphertext. The two ends check each other's certificates and assignments as always,
so a relay that lies can only fail. Whoever has a certificate of the job may use a relay; what it may do at the other
end is decided there.

What fails, and what happens:

    a relay or its host ends       its tunnels are silent for `SILENT_S` at most, or are reset; what they carried
                                   breaks, and peers connect anew through the other relay, where the listener waits
    the only relay ends            its parent starts it again on the same port; all come back with backoff
    a relay is slow, or at its cap its credit comes slowly: senders wait, nothing is dropped; beats go before bytes
    a receiver does not read       its own connection stops after a window; others in the same tunnel go on
    the rules are broken           (credit, numbers, sizes) the tunnel is closed, with all its connections
    a relay has no room            the connection is refused with the reason, and the next relay is tried
    a direct way appears           peers with a relayed link try all direct ways every `UPGRADE_EVERY_S` and move when
                                   one answers; calls under way end on the relayed one
    a direct way breaks            the next connection finds no direct answer within a second and goes through a relay
    a certificate is revoked       the coordinator's relay closes that worker's tunnels; those of workers stay until it
                                   expires, but no peer takes its calls, because its assignment is not renewed
"""

"""Who can be reached from outside, and through which relay if not.

    book    what is known of each worker, and whom to tell what (pure)
    desk    around it: sessions, the relay's process, and the addresses from which workers come

A worker says where it listens; the relay's process dials back. Who does not answer there is told to hold tunnels to
relays, says to which it does, and everybody else is told that. All of it is soft: nothing is in the log, and after a
restart workers say it again. What fails, and what happens: see `starlings_protos/relay/__init__.py`, and

    the relay's process ends       it is started again on its port; until then the book keeps what it knew
    dialling back takes too long   counts as not reached; asked again every `RETRY_S` with jitter
    a worker is reached again      its tunnels are given up after two good answers, so that a flapping way costs nothing
    peers cannot reach a worker    that dialling back reaches: it is told to hold tunnels too, for `DOUBT_S`
"""

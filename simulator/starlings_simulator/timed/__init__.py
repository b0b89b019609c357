"""How fast a swarm would be: both real cores and the real planner, with modelled seconds and bytes, on a virtual clock.

    machines    what a simulation is told: workers, sites, round trips, when each is there and how slow
    links       uplinks and downlinks as fluids that transfers share
    costs       seconds of pieces of work and sizes of messages, from the job's own accounts
    pushes      one push between engines: header, judgement, body, receipt, and each side's end
    engine      a worker core, whose effects take time
    home        its machine: control stream, heartbeats, starts and ends
    owner       the coordinator's core, planner and keeper
    figures     where every worker's seconds went
    run, report

What is not modelled: values. Losses are constants, nothing is out of memory, nothing is refused for what is in it. The
simulator beside this package (`simulation.py`) is the one that looks for what the cores do wrong.
"""

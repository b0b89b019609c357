"""Hours of a big swarm: what flows is constant between control events, and nobody plays single microbatches.

    holders    what every holder can do, alike ones put together, as a problem of the planner's linear programme
    rates      that programme: how much flows, and through whom
    sample     a few of the holders, played event by event: what slots, barriers and round trips leave of the programme
    copies     when everybody has its weights, who all draw on one link
    placing    who gets which span: the planner of live jobs, and for very many a rounding of its relaxation
    training   what trains, and what has flowed; accounts: where everybody's seconds went
    run        coming, going, planning, copying: the events between which rates hold

The planner, the costs and the exchanges' sizes are those of `timed`; coming, going and placing are modelled after the
coordinator's core, which would take too long for so many. `tests/simulation/test_flow.py` holds both together.
"""

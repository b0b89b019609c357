"""The coordinator's pure core: `handle(event, now) -> (records, effects)`; state is a fold over records."""

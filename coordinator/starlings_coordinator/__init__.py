"""The coordinator: a pure core that decides, and thin shells around it (process, store, streams, children)."""

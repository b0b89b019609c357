"""The objective `dtfm` (COMM-COST): pipelines of equal machines by links alone, as in published scenarios."""

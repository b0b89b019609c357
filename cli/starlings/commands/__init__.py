"""One module per group of commands; `starlings.main` puts them together."""

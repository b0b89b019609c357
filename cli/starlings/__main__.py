"""`python -m starlings`."""

from starlings.main import main

main()

"""`python -m starlings_protos.relay`: started by a coordinator or a supervisor, never by people."""

from __future__ import annotations

import asyncio
import logging
import sys

from starlings_protos.errors import StarlingsError
from starlings_protos.pipes import claim_stdio
from starlings_protos.relay.process import serve


def main() -> int:
    incoming, outgoing = claim_stdio()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        return asyncio.run(serve(incoming, outgoing))
    except StarlingsError as error:
        logging.getLogger(__name__).error("%s", error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())

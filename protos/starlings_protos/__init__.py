"""How the parts talk: the protobuf messages and their records, frames, pipes, identities and channels."""

import os

# gRPC reads these once, when it is first imported. Its own log lines say less than our errors do and go to the same
# terminal; and our processes start children by exec, never by a bare fork, so its fork handlers only get in the way.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

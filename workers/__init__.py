"""One process per rank, and the runtime's end of the link to it.

gRPC reads its environment when it is first imported, hence the settings here: whoever imports a module of this package
before gRPC has them.

gRPC acts on every fork of a process, and where it is at work half of the children have been seen to crash before they
become another program, a daemon of Ray for one. Nothing here forks to go on as itself. And it tells of each handshake
that fails, on standard error and in a form of its own, which whoever reaches a port could have as often as they like.
"""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

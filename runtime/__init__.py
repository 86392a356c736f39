"""The host side. It imports gRPC in several places, and `workers` has a word to say before the first."""

import workers as _before_grpc  # noqa: F401

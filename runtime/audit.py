"""The log of what operators change, under a name of its own, so that it is kept whatever else is logged."""

from __future__ import annotations

import logging

AUDIT = logging.getLogger("outrider.audit")

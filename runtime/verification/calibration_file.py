"""What was learnt of a drafter's scores, in a file that outlasts the server. Knows no engine and no profile."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

from runtime.replaced_file import replace_text
from runtime.verification.calibration import Calibrator
from workers.plan import WorkerDescription

log = logging.getLogger(__name__)

FOLDER = "calibration"
"""Of a server's state_dir."""
SCHEMA = 1


class CalibrationFile:
    """One per state_dir, checkpoint and way of scoring: scores of another one mean something else.

    measure: settings.speculation.confidence.
    """

    def __init__(self, state_dir: Path, description: WorkerDescription, measure: str) -> None:
        what = (description.checkpoint, description.dtype, description.numerics, description.gamma_max, measure)
        self.path = state_dir / FOLDER / f"{hashlib.sha256(repr(what).encode()).hexdigest()[:12]}.json"

    def load(self, calibrator: Calibrator) -> None:
        """Goes on from what was kept, if anything was. A file that cannot be read is named in the log and let be."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if not isinstance(content, dict) or content.get("schema") != SCHEMA:
                raise ValueError(f"its schema is not {SCHEMA}")
            calibrator.restore(content["calibration"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, RecursionError) as error:
            log.warning("%s holds no calibration (%s): drafts are calibrated anew; delete it", self.path, error)
            return
        log.info("confidences are calibrated by %s", self.path)

    def save(self, calibrator: Calibrator) -> None:
        """Replaces the file at once. What cannot be written is named in the log: it will be learnt again."""
        text = json.dumps({"schema": SCHEMA, "calibration": calibrator.state()}, allow_nan=False) + "\n"
        try:
            replace_text(self.path, text)
        except OSError as error:
            log.warning("the calibration is not kept: %s: %s", self.path, error.strerror or error)

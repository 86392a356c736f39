"""`make test-all`: every test file in a pytest run of its own, resumable. Knows nothing of what the tests test.

Unlike `make test` it leaves out no test marked `full` and takes the property tests' profile of that name.

Results lie in .outrider/test-all/<content>/, where <content> is a digest of all source files: a file that passed is not
run again until any source changes. Exit code 1 if a file failed.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTHING_COLLECTED = 5
TEST_TIMEOUT_S = 3600
"""Of one test that names no time of its own."""


def content_digest() -> str:
    """Digest of every file of the working tree that git does not ignore, names and bytes."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    digest = hashlib.sha256()
    for name in sorted(set(listing.stdout.split(b"\0")) - {b""}):
        path = ROOT / name.decode()
        if path.is_file():
            digest.update(name + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def run_file(path: Path, log: Path) -> int:
    """Runs one test file, its output to the log. Returns pytest's exit code; a file with nothing to run passes."""
    with log.open("w") as out:
        options = ["-m", "not gpu", "--hypothesis-profile=full", f"--timeout={TEST_TIMEOUT_S}"]
        command = [sys.executable, "-m", "pytest", *options, str(path.relative_to(ROOT))]
        code = subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT).returncode
    return 0 if code == NOTHING_COLLECTED else code


def main() -> int:
    results = ROOT / ".outrider" / "test-all" / content_digest()
    results.mkdir(parents=True, exist_ok=True)
    failed = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = path.relative_to(ROOT / "tests").with_suffix("").as_posix().replace("/", ".")
        passed = results / f"{name}.passed"
        if passed.exists():
            print(f"{name:<44} passed before in {passed.read_text()}", flush=True)
            continue
        print(f"{name:<44} ", end="", flush=True)
        began = time.monotonic()
        log = results / f"{name}.log"
        code = run_file(path, log)
        seconds = f"{time.monotonic() - began:.1f} s"
        print(f"{'passed' if code == 0 else 'FAILED'} in {seconds}", flush=True)
        if code == 0:
            passed.write_text(seconds)
        else:
            failed.append(name)
            print(log.read_text()[-4000:], flush=True)
    print(f"{len(failed)} files failed{': ' if failed else ''}{', '.join(failed)}; logs in {results.relative_to(ROOT)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

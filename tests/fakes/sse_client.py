"""An HTTP client that prints what it is sent as it arrives: `python -P sse_client.py URL CA BODY`. Where it is refused,
it prints the status and what was said, status 0 where nobody answers. Needs nothing installed.
"""

from __future__ import annotations

import ssl
import sys
import urllib.error
import urllib.request


def main(url: str, ca: str, body: str) -> None:
    request = urllib.request.Request(url, data=body.encode(), headers={"content-type": "application/json"})
    tls = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=ca))
    # A proxy of the environment leads elsewhere.
    opener = urllib.request.build_opener(tls, urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as answer:
            for line in answer:
                print(line.decode().rstrip("\n"), flush=True)
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode(), flush=True)
    except OSError as error:
        print(0, error, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

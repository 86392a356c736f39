"""Several hosts: a front and a Ray head, two nodes whose ranks meet across the network, and a gateway, each with a
network of its own and mutual TLS on every link between them; and what becomes of streams when a link is cut."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from flow.house import House, heldout, request
from flow.namespaces import CAN_BE_MADE, EDGE, HEAD, NODES, PATIENCE_S, ROOT, Hosts, outrider, wait_for
from oracles.days import by_day, on_turn

from runtime.cli.console import EXIT_UNAVAILABLE

FRONT_PORT, GATEWAY_PORT = 50099, 30099
RANK_PORTS = range(51900, 51910)
RANKS_ONLY = f"sport >= {RANK_PORTS.start} and sport < {RANK_PORTS.stop}".split()
BIN = Path(sys.executable).parent
SERVICE = "outrider.v1.InferenceService"
PROMPT = heldout(1, 90)[0]

DETECTED_WITHIN_S = 16.0
"""A link that is silent breaks after 15 s at most (workers/channel.py); then the streams end."""

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(not CAN_BE_MADE, reason="network namespaces need root and ip"),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path_factory.mktemp("hosts"))
    try:
        hosts.build()
        hosts.certify()
        hosts.start_ray()
        yield hosts
    finally:
        hosts.destroy()


@contextlib.contextmanager
def serving(hosts: Hosts, name: str, *layout: str) -> Iterator[str]:
    """A front on the head's host, with mutual TLS towards its clients and its ranks; yields its log's name."""
    log = f"serve-{name}.log"
    pair = {"certificate": hosts.tls("links"), "key": hosts.tls("links.key")}
    tls = {
        **{f"{port}.tls.{key}": path for port in ("server", "cluster") for key, path in pair.items()},
        "server.tls.client_ca": hosts.tls("authority"),
        "cluster.tls.ca": hosts.tls("authority"),
        "cluster.worker_port_min": RANK_PORTS.start,
        "cluster.worker_port_max": RANK_PORTS.stop - 1,
        "state_dir": hosts.folder / name,
    }
    process = hosts.start(
        *(HEAD, log, *outrider("serve", *layout, "--ray-address", hosts.head, "--host", hosts.address(HEAD))),
        *("--port", str(FRONT_PORT), *(f"--set={key}={value}" for key, value in tls.items())),
    )
    hosts.until("ready: ", log, process)
    yield log
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0, hosts.text_of(log)


def asking(hosts: Hosts, command: str, *arguments: str) -> tuple[str, ...]:
    """A client of the front itself, past the gateway."""
    files = {"--ca": "authority", "--cert": "client", "--key": "client.key"}
    shown = [word for flag, name in files.items() for word in (flag, str(hosts.tls(name)))]
    return outrider(*shown, command, *arguments, "--address", f"{hosts.address(HEAD)}:{FRONT_PORT}")


def ask(hosts: Hosts, command: str, *arguments: str, check: bool = True) -> str:
    return hosts.run(EDGE, *asking(hosts, command, *arguments), check=check)


@on_turn(0, of=4)
@pytest.mark.parametrize("layout", by_day({"tp2": ("--tp", "2"), "dp2_ep2": ("--dp", "2", "--ep", "2")}))
def test_ranks_on_two_hosts_serve_as_one(hosts: Hosts, house: House, layout: tuple[str, ...]) -> None:
    expected = house.run(house.generate(request(PROMPT, 24, ignore_eos=True))).text
    with serving(hosts, f"as-one{layout[0]}", *layout) as log:
        options = ("--max-tokens", "24", "--temperature", "0", "--ignore-eos")
        assert expected.strip() in ask(hosts, "generate", PROMPT, *options)
        found = re.findall(rf"({re.escape(hosts.address(1))}|{re.escape(hosts.address(2))}):(\d+)", hosts.text_of(log))
        assert {address for address, _ in found} == {hosts.address(host) for host in NODES}, hosts.text_of(log)
        assert {int(port) for _, port in found} <= {*RANK_PORTS}
        for host in NODES:  # what a rank opens is on its own address alone
            opened = hosts.run(host, "ss", "-ltnH", *RANKS_ONLY)
            places = [line.split()[3] for line in opened.splitlines()]
            assert places
            assert all(hosts.address(host) in place for place in places), opened
    # The cluster has its resources back for the next one.
    _until_free(hosts)


def _until_free(hosts: Hosts) -> None:
    status = (sys.executable, "-m", "ray.scripts.scripts", "status", "--address", hosts.head)
    wait_for(lambda: "0.0/2.0 CPU" in hosts.run(HEAD, *status, check=False))


@contextlib.contextmanager
def gateway(hosts: Hosts) -> Iterator[None]:
    """smg on its own host, over TLS for its clients, and beside it the Envoy that speaks mutual TLS to the front."""
    folder = hosts.folder / "envoy"
    shutil.copytree(ROOT / "deploy" / "envoy", folder)
    (folder / "certificates").mkdir()
    for name, there in (("client", "envoy"), ("client.key", "envoy.key"), ("authority", "replicas-ca")):
        shutil.copy(hosts.tls(name), folder / "certificates" / f"{there}.pem")
    sidecar = yaml.safe_load((folder / "sidecar.yaml").read_text())
    [cluster], [listener] = (sidecar["static_resources"][kind] for kind in ("clusters", "listeners"))
    [endpoint] = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    endpoint["endpoint"]["address"]["socket_address"].update(address=hosts.address(HEAD), port_value=FRONT_PORT)
    inward = listener["address"]["socket_address"]["port_value"]
    (folder / "sidecar.yaml").write_text(yaml.safe_dump(sidecar))
    options = ("--disable-hot-restart", "--concurrency", "1")
    envoy = hosts.start(EDGE, "envoy.log", str(BIN / "envoy"), "-c", "sidecar.yaml", *options, cwd=folder)
    hosts.until("starting workers", "envoy.log", envoy)
    smg = hosts.start(
        *(EDGE, "smg.log", str(BIN / "smg"), "launch", "--worker-urls", f"grpc://127.0.0.1:{inward}"),
        *("--host", "127.0.0.1", "--port", str(GATEWAY_PORT), "--policy", "round_robin"),
        *("--tls-cert-path", str(hosts.tls("edge")), "--tls-key-path", str(hosts.tls("edge.key"))),
        *("--tokenizer-path", str(ROOT / "configs" / "models" / "demo")),
        *("--health-check-interval-secs", "1", "--health-failure-threshold", "1", "--health-success-threshold", "1"),
        *("--prometheus-host", "127.0.0.1"),
    )
    wait_for(lambda: smg.poll() is None and complete(hosts, "a", 1)[0] == 200)
    yield
    for process in (smg, envoy):
        process.kill()


def body(prompt: str, max_tokens: int, *, stream: bool = False) -> str:
    told = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": stream}
    return json.dumps({**told, "ignore_eos": True})


def client(hosts: Hosts, sent: str) -> tuple[str, ...]:
    url = f"https://localhost:{GATEWAY_PORT}/v1/completions"
    return sys.executable, "-P", str(ROOT / "tests" / "fakes" / "sse_client.py"), url, str(hosts.tls("authority")), sent


def complete(hosts: Hosts, prompt: str, max_tokens: int) -> tuple[int, str]:
    """Asks through the gateway; the status, and the text or what was said instead."""
    said = hosts.run(EDGE, *client(hosts, body(prompt, max_tokens)))
    if said.startswith("{"):
        return 200, json.loads(said)["choices"][0]["text"]
    status, _, text = said.partition(" ")
    return int(status), text


@on_turn(2, of=4)
def test_a_link_that_is_cut_ends_streams_in_time_and_service_returns_with_it(hosts: Hosts) -> None:
    with serving(hosts, "cut", "--tp", "2"), gateway(hosts):
        text = lose_a_node(hosts)
        hosts.mend(NODES[1])
        wait_for(lambda: complete(hosts, PROMPT, 24) == (200, text))
        assert "SERVING" in ask(hosts, "health", "--service", SERVICE).split()
        # The rank that nobody could reach is gone, too.
        opened = hosts.run(NODES[1], "ss", "-ltnpH", *RANKS_ONLY)
        assert len(set(re.findall(r"pid=(\d+)", opened))) == 1, opened


@pytest.mark.full
def test_a_node_that_ray_has_given_up_serves_again_when_it_is_started_anew(hosts: Hosts) -> None:
    with serving(hosts, "given-up", "--tp", "2"), gateway(hosts):
        text = lose_a_node(hosts)
        gone = hosts.nodes[NODES[1]]
        status = (sys.executable, "-m", "ray.scripts.scripts", "status", "--address", hosts.head)
        wait_for(lambda: "/1.0 CPU" in hosts.run(HEAD, *status, check=False), 2 * PATIENCE_S)
        hosts.mend(NODES[1])
        assert gone.wait(PATIENCE_S) == 1  # whoever runs `ray start --block` sees it end, and starts it again
        assert complete(hosts, PROMPT, 24)[0] == 503
        hosts.start_node(NODES[1])
        wait_for(lambda: complete(hosts, PROMPT, 24) == (200, text))


def lose_a_node(hosts: Hosts) -> str:
    """Cuts the link of a rank while streams run, and looks at all that can be seen of it; what was said before."""
    status, text = complete(hosts, PROMPT, 24)
    assert status == 200
    greedy = ("--temperature", "0", "--ignore-eos")
    assert text in ask(hosts, "generate", PROMPT, "--max-tokens", "24", *greedy)
    through = hosts.start(EDGE, "through.log", *client(hosts, body(PROMPT, 3000, stream=True)))
    direct = hosts.start(EDGE, "direct.log", *asking(hosts, "generate", PROMPT, "--max-tokens", "3000", *greedy))
    wait_for(lambda: hosts.text_of("through.log").count("data: ") > 5 and len(hosts.text_of("direct.log")) > 20)
    hosts.cut(NODES[1])
    wait_for(lambda: None not in (through.poll(), direct.poll()), DETECTED_WITHIN_S)
    assert direct.returncode == EXIT_UNAVAILABLE, hosts.text_of("direct.log")
    assert "error: UNAVAILABLE: a worker was lost (LinkBroken: rank " in hosts.text_of("direct.log")
    error, done = hosts.text_of("through.log").split("data: ")[-2:]
    assert json.loads(error)["error"]["message"].startswith("Stream error: a worker was lost (LinkBroken: rank ")
    assert done.strip() == "[DONE]"
    assert "NOT_SERVING" in ask(hosts, "health", "--service", SERVICE, check=False)
    begin = time.monotonic()
    assert complete(hosts, PROMPT, 24)[0] == 503
    assert time.monotonic() - begin < 5
    return text

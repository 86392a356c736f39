"""The pod of the demo overlay, as near as a machine without Kubernetes comes: its command, its files, its mounts over a
root file system that cannot be written, no network but its own.

Namespaces of mounts and of the network stand in for the container; root makes them.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from oracles.days import on_turn
from oracles.manifests import ROOT, Manifests, Object, Pod, objects_of

PATIENCE_S = 60

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="namespaces need root"),
]

OUTRIDER = f"{shlex.quote(sys.executable)} -c 'from runtime.cli.main import main; main()'"

SCRIPT = """
set -euo pipefail
ip link set lo up
mount -t tmpfs none "$root"
for one in /*; do
  name=${one#/}
  case $name in tmp|var|etc|proc|dev) mkdir "$root/$name";;
  *)
    if [ -L "$one" ]; then cp -P "$one" "$root/"
    elif [ -d "$one" ]; then mkdir "$root/$name"; mount --rbind "$one" "$root/$name"
    fi;;
  esac
done
cp -a /etc/passwd /etc/group /etc/hosts /etc/nsswitch.conf /etc/ld.so.cache "$root/etc/" 2>/dev/null || true
mount --rbind /dev "$root/dev"
mount -t proc none "$root/proc"
@MOUNTS@
mount -o remount,bind,ro "$root"
for one in $(awk -v root="$root/" 'index($5, root) == 1 {print $5}' /proc/self/mountinfo); do
  case $one in @WRITABLE@) ;; *) mount -o remount,bind,ro "$one" 2>/dev/null || true;; esac
done
exec chroot "$root" bash -c "$inside"
"""

INSIDE = """
cd /
outrider() {{ {outrider} "$@"; }}
if touch /usr/x 2>/dev/null || touch /etc/x 2>/dev/null; then echo "the root can be written"; exit 9; fi
{outrider} {serve} > /tmp/serve.log 2>&1 &
server=$!
trap 'cat /tmp/serve.log; kill -9 $server' ERR
until outrider health --service outrider.v1.InferenceService > /dev/null 2>&1; do
  kill -0 $server; [ $SECONDS -lt {patience} ]
done
outrider health
outrider health --address 127.0.0.1:50053 --service outrider.v1.OperatorService
outrider generate 'def f(' --address 127.0.0.1:50051 --max-tokens 8 --temperature 0 > /tmp/text
grep -q . /tmp/text
# A new policy, as `kubectl apply` brings it.
mkdir /etc/outrider/..next && cp /etc/outrider/..data/* /etc/outrider/..next/
printf 'speculation: {{policy: "off", revision: 2}}\\n' > /etc/outrider/..next/policy.yaml
ln -s ..next /etc/outrider/..data_tmp && mv -T /etc/outrider/..data_tmp /etc/outrider/..data
until outrider policy get --address 127.0.0.1:50053 | grep -q 'revision 2'; do [ $SECONDS -lt {patience} ]; done
outrider policy set fixed --gamma 2 --address 127.0.0.1:50053 > /dev/null
kill -TERM $server
wait $server
ls /var/lib/outrider
"""


def mount_lines(pod: Pod, container: Object, folder: Path) -> tuple[list[str], list[str]]:
    """What mounts the container's volumes, and where it may write: ConfigMaps come from `folder`."""
    lines, writable = [], []
    for mount in container["volumeMounts"]:
        at = f'"$root{mount["mountPath"]}"'
        lines.append(f"mkdir -p {at}")
        if "projected" in pod.volumes[mount["name"]]:
            lines.append(f"mount --bind {shlex.quote(str(folder))} {at}")
            writable.append(mount["mountPath"])  # by the kubelet, whose part the script takes
        else:
            lines.append(f"mount -t tmpfs none {at}")
            writable += [] if mount.get("readOnly") else [mount["mountPath"]]
    return lines, writable


@on_turn(1, of=6)
def test_the_demo_pod_serves_with_what_it_may_write_and_takes_a_new_policy(tmp_path):
    manifests = Manifests(objects_of("cpu-demo"))
    ((pod, container, _),) = manifests.servers()
    folder = tmp_path / "config"
    (folder / "..first").mkdir(parents=True)
    (folder / "..data").symlink_to("..first")
    for name, text in manifests.files_at(pod, container, "/etc/outrider").items():
        (folder / "..first" / name).write_text(text.replace("withdraw_s: 10", "withdraw_s: 0"))
        (folder / name).symlink_to(f"..data/{name}")
    root = tmp_path / "root"
    root.mkdir()
    lines, writable = mount_lines(pod, container, folder)
    inside = INSIDE.format(outrider=OUTRIDER, serve=shlex.join(container["args"]), patience=PATIENCE_S)
    script = SCRIPT.replace("@MOUNTS@", "\n".join(lines)).replace(
        "@WRITABLE@", "|".join(f'"$root{path}"*' for path in writable)
    )
    environment = {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}
    done = subprocess.run(
        ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "bash", "-c", script],
        capture_output=True,
        text=True,
        timeout=150,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "root": str(root),
            "inside": "set -eE -o pipefail\n" + inside,
            **environment,
        },
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.split()[:2] == ["SERVING", "SERVING"]
    # What outlives the pod: an operator's policy among it.
    assert {"policy.json", "logs"} <= set(done.stdout.split())

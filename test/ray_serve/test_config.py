"""The configuration that the documentation shows is one that Serve takes, and its table of options is all of them."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="THE RAY EXTRA IS NOT INSTALLED, this test did not run: pip install '.[ray]'")

import yaml
from ray.serve.schema import ServeDeploySchema

from marconi_ray import application
from marconi_ray.options import Options

TEXT = (Path(__file__).parents[2] / "docs" / "fleet.md").read_text(encoding="utf-8")


@pytest.fixture
def config() -> dict[str, Any]:
    (found,) = re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.DOTALL)
    read: dict[str, Any] = yaml.safe_load(found)
    return read


def test_serve_takes_the_configuration_that_is_shown(config: dict[str, Any]) -> None:
    (shown,) = ServeDeploySchema.model_validate(config).applications
    assert shown.import_path == "marconi_ray:application"
    made = application(shown.args)
    names = {made._bound_deployment.name} | {each._bound_deployment.name for each in _bound(made)}
    assert {each.name for each in shown.deployments} <= names == {"SGLang", "Ingress"}


def test_the_table_of_options_is_all_of_them() -> None:
    (table,) = re.findall(r"\| `args` \|.*?\n\n", TEXT, flags=re.DOTALL)
    firsts = [line.split("|")[1] for line in table.strip().splitlines()]
    named = re.findall(r"`(\w+)`", " ".join(firsts))
    assert set(named) - {"args"} == set(Options.__dataclass_fields__)


def test_a_wrong_option_ends_the_build_with_a_line() -> None:
    with pytest.raises(ValueError, match="an option must be num_replicas, got replicas"):
        application({"model": "m", "replicas": 3})


def _bound(made: Any) -> list[Any]:
    return [each for each in made._bound_deployment.init_args if hasattr(each, "_bound_deployment")]

import sys

import pytest

from greenroom.serve.admin.declarative import build_document, described, read_targets
from greenroom.serve.code.importing import forget_modules
from greenroom.serve.config_file import ConfigFile, written
from greenroom.serve.schema import InvalidDocumentError, read_document

SOURCE = """
from pydantic import BaseModel
from greenroom import serve

@serve.deployment(num_replicas=2)
class Tax:
    def __init__(self, rate=1.0):
        self.rate = rate
    def on(self, price):
        return price * self.rate

@serve.deployment(ray_actor_options={"num_cpus": 0.5}, autoscaling_config={"max_replicas": 4})
class Shop:
    def __init__(self, tax):
        self.tax = tax
    def __call__(self): ...

class Args(BaseModel):
    rate: float

app = Shop.bind(Tax.bind())
def build(args: Args):
    return Shop.bind(Tax.bind(args.rate))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "declared_shop.py").write_text(SOURCE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("declared_shop", None)


def one(import_path="declared_shop:app", **fields):
    return {"applications": [{"import_path": import_path, **fields}]}


def built_of(document, folder):
    return build_document(read_document(document), folder, None, folder)


def test_options_of_the_document_go_before_those_of_the_code(folder):
    parts = [{"name": "Tax", "num_replicas": 3, "user_config": {"a": 1}}]
    document = one("declared_shop:build", args={"rate": "0.5"}, deployments=parts)
    (spec,) = built_of(document, folder).applications
    assert (spec.name, spec.ingress, spec.route_prefix) == ("default", "Shop", "/")
    tax, shop = spec.deployments
    assert (tax.config.num_replicas, tax.config.user_config) == (3, {"a": 1})
    assert shop.config.autoscaling_config.max_replicas == 4


def test_what_is_wrong_with_the_code_is_reported_with_its_place(folder):
    (folder / "broken_shop.py").write_text("raise LookupError('no file')\n")
    document = {
        "applications": [
            {"name": "a", "route_prefix": "/a", "import_path": "nowhere:app"},
            {"name": "b", "route_prefix": "/b", "import_path": "broken_shop:app"},
            {
                "name": "c",
                "route_prefix": "/c",
                "import_path": "declared_shop:build",
                "args": {"rate": "much"},
            },
            {
                "name": "d",
                "route_prefix": "/d",
                "import_path": "declared_shop:app",
                "deployments": [{"name": "Taxes"}],
            },
        ]
    }
    with pytest.raises(InvalidDocumentError) as caught:
        built_of(document, folder)
    found = str(caught.value)
    for text in (
        "applications[0].import_path: no module named 'nowhere'",
        "applications[1].import_path: importing 'broken_shop' failed: LookupError: no file",
        "applications[2].import_path: invalid Args: rate='much': must be a valid number",
        (
            "applications[3].deployments[0].name: no deployment of declared_shop:app is named "
            "'Taxes'; there are: Shop, Tax"
        ),
    ):
        assert text in found


def test_modules_of_one_name_in_two_working_dirs_are_two(folder):
    for name, replicas in (("one", 1), ("two", 2)):
        (folder / name).mkdir()
        text = SOURCE.replace("num_replicas=2", f"num_replicas={replicas}")
        (folder / name / "twice_shop.py").write_text(text)
    document = {
        "applications": [
            {
                "name": name,
                "route_prefix": f"/{name}",
                "import_path": "twice_shop:app",
                "runtime_env": {"working_dir": name},
            }
            for name in ("one", "two")
        ]
    }
    built = built_of(document, folder)
    replicas = [spec.deployments[0].config.num_replicas for spec in built.applications]
    assert replicas == [1, 2]
    digests = {
        part.actor_options.runtime_env.working_dir
        for spec in built.applications
        for part in spec.deployments
    }
    assert digests == set(built.folders)
    assert len(digests) == 2
    forget_modules(folder)
    given = build_document(read_document(document), folder, folder / "one")
    replicas = [spec.deployments[0].config.num_replicas for spec in given.applications]
    assert replicas == [1, 1], "a folder that is given goes before both"


def test_a_document_of_code_builds_the_same_application(folder, tmp_path):
    document = described(read_targets(["declared_shop:build", "rate=0.5"]), folder)
    assert document == {
        "applications": [
            {
                "name": "default",
                "route_prefix": "/",
                "import_path": "declared_shop:build",
                "args": {"rate": "0.5"},
                "deployments": [
                    {"name": "Tax", "num_replicas": 2},
                    {
                        "name": "Shop",
                        "autoscaling_config": {"max_replicas": 4},
                        "ray_actor_options": {"num_cpus": 0.5},
                    },
                ],
            }
        ]
    }
    path = tmp_path / "app.yaml"
    path.write_text(written(document))
    again = build_document(read_document(ConfigFile(path, {}).document), folder, folder)
    plain = build_document(
        read_document(one("declared_shop:build", args={"rate": 0.5})), folder, folder
    )
    assert again.applications == plain.applications


def test_several_applications_are_called_by_their_modules(folder):
    document = described(read_targets(["declared_shop:app", "declared_shop:app"]), folder)
    named = [(each["name"], each["route_prefix"]) for each in document["applications"]]
    assert named == [
        ("declared_shop", "/declared_shop"),
        ("declared_shop-2", "/declared_shop-2"),
    ]
    with pytest.raises(ValueError, match="'a=b': expected MODULE:ATTRIBUTE before its arguments"):
        read_targets(["a=b"])

import json
import pickle
import re

import pytest

from greenroom.core.config import BackendConfig, Expanded, config_shown
from greenroom.core.errors import InvalidRequestError
from greenroom.serve.config_file import ConfigFile, written
from greenroom.serve.schema import InvalidDocumentError, ServeDeploySchema, read_document

A = "applications[0].deployments"
ROUTE = ": must start with '/', or be None for no route; for example '/predict'"
MISSING = "u: no such setting; did you mean num_gpus?"
OFF = "to have none when idle, set min_replicas=0 in autoscaling_config; else delete it"
APP = "applications:\n  - import_path: mine:app\n"


@pytest.fixture
def read(tmp_path):
    def read(text, name="app.yaml", **variables):
        path = tmp_path / name
        path.write_text(text)
        file = ConfigFile(path, variables)
        with file.located():
            return read_document(file.document)

    return read


@pytest.fixture
def refused(read, tmp_path):
    """Return what is wrong with a file: a line for each problem, without the folder."""

    def refused(text, name="app.yaml", **variables):
        with pytest.raises(InvalidRequestError) as caught:
            read(text, name, **variables)
        return str(caught.value).replace(f"{tmp_path}/", "").splitlines()

    return refused


def test_an_application_is_called_default_and_has_the_root(read):
    (application,) = read(APP).applications
    assert (application.name, application.route_prefix) == ("default", "/")
    assert application.deployments == []


def test_a_file_of_ray_serve_is_taken_as_it_is(read):
    document = read(
        """
proxy_location: EveryNode
http_options: {host: 0.0.0.0, port: 8000}
grpc_options: {port: 9000, grpc_servicer_functions: []}
logging_config: {encoding: TEXT, log_level: INFO, logs_dir: null, enable_access_log: true}
applications:
- name: app1
  route_prefix: /
  import_path: fruit.deployment_graph
  runtime_env: {env_vars: {A: b}}
  args: {depth: 3}
  deployments:
  - name: MangoStand
    num_replicas: auto
    max_concurrent_queries: 5
    user_config: {price: 3}
    ray_actor_options: {num_cpus: 0.0, num_gpus: 1}
"""
    )
    (application,) = document.applications
    (deployment,) = application.deployments
    assert application.import_path == "fruit:deployment_graph"
    assert application.args == {"depth": 3}
    assert application.runtime_env.env_vars == {"A": "b"}
    assert deployment.given.keys() == {
        "autoscaling_config",
        "max_ongoing_requests",
        "user_config",
        "ray_actor_options",
    }


def test_every_problem_has_its_line_and_column(refused):
    assert refused(
        """applications:
  - name: shop
    import_path: mine:app
    route_prefix: nowhere
    deployments:
      - name: A
        num_replicas: 0
      - num_replica: 2
        name: B
        ray_actor_options: {num_gpu: 1}
      - max_replicas: 3
"""
    ) == [
        "app.yaml:4:5: applications[0].route_prefix='nowhere'" + ROUTE,
        f"app.yaml:7:9: {A}[0].num_replicas=0: must be at least 1; {OFF}",
        f"app.yaml:8:9: {A}[1].num_replica: no such setting; did you mean num_replicas?",
        f"app.yaml:10:29: {A}[1].ray_actor_options.num_gp{MISSING}",
        f"app.yaml:11:9: {A}[2].max_replicas: no such setting; did you mean num_replicas?",
        f"app.yaml:11:9: {A}[2].name: must be given",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "app.yaml:1:5: not YAML: expected the node content"),
        ("a: 1\na: 2", "app.yaml:2:1: not YAML: the key 'a' stands twice"),
        ("a: !!python/object:os.system {}", "app.yaml:1:4: not YAML: could not determine"),
        ("a: 2024-13-45", "app.yaml: not YAML: month must be in 1..12"),
        ("a: &a [*a]", "app.yaml:1:1: nested too deep, or in itself"),
        ("", "app.yaml:1:1: None: must be a mapping with applications"),
        ("[]", "app.yaml:1:1: []: must be a mapping with applications"),
        ("applications: 1", "app.yaml:1:1: applications=1: must be a valid list"),
        ("applications: []\n1: 2", "app.yaml:2:1: [1]=1: must be a string"),
        (APP + "    host: a", "app.yaml:3:5: applications[0].host: no such setting; it is one of"),
        (APP + "import_path: a:b", "app.yaml:3:1: import_path: no such setting; it is an"),
        (APP + "    import: a:b", "app.yaml:3:5: applications[0].import: no such setting; there"),
        (APP + "    args: {at: 2024-01-02}", "app.yaml:3:5: applications[0].args: must be JSON-"),
        (
            APP + "    name: a#b",
            "app.yaml:3:5: applications[0].name='a#b': expected a name",
        ),
        (APP + "  - import_path: a:b", "app.yaml:1:1: applications: two of them have the name"),
        (APP + "proxy_location: HeadOnly", "app.yaml:3:1: proxy_location='HeadOnly': must be"),
        (APP + "grpc_options: {grpc_servicer_functions: [b]}", "app.yaml:3:42: grpc_options.g"),
        (APP + "http_options: {port: 99999}", "app.yaml:3:16: http_options.port=99999: must be"),
        (
            APP + "    deployments: [{name: A, rolling_update_percentage: 3}]",
            (
                "app.yaml:3:29: applications[0].deployments[0].rolling_update_percentage: no such "
                "setting; it is called max_surge_percent"
            ),
        ),
    ],
)
def test_a_bad_file_is_refused_with_the_place(refused, text, message):
    assert refused(text)[0].startswith(message)


def test_json_files_have_lines_too(read, refused):
    document = {"applications": [{"import_path": "mine:app", "args": {"rate": 1e-5}}]}
    assert read(json.dumps(document), "a.json").applications[0].args == {"rate": 1e-5}
    bad = json.dumps({"applications": [{"import_pat": 1}]}, indent="\t")
    assert refused(bad, "a.json")[1].startswith("a.json:4:4: applications[0].import_pat: no such")
    assert refused("{", "a.json")[0].startswith("a.json:1:2: not JSON: ")
    assert refused('{"a": 1, "a": 2}', "a.json") == ["a.json: not JSON: the key 'a' stands twice"]


def test_a_file_that_cannot_be_read_is_reported(tmp_path):
    with pytest.raises(InvalidRequestError, match=r"none\.yaml: cannot be read: No such file"):
        ConfigFile(tmp_path / "none.yaml")


def test_variables_are_replaced_in_values_of_any_kind(read):
    text = APP + (
        "    route_prefix: ${ROUTE:-/x}\n"
        "    args: {url: 'postgres://u:${PW}@h', plain: '$${PW}', empty: '${EMPTY:-e}'}\n"
        "    deployments: [{name: A, num_replicas: '${N}'}]\n"
    )
    (application,) = read(text, PW="se: [cret", N="3", EMPTY="").applications
    assert application.route_prefix == "/x"
    assert application.args == {"url": "postgres://u:se: [cret@h", "plain": "${PW}", "empty": "e"}
    assert application.deployments[0].num_replicas == 3


def test_a_variable_that_is_not_set_is_named(refused):
    found = refused(APP + "    args: {a: '${PW}', b: ['${OTHER}', '${bad-name}']}")
    assert [line.partition("; ")[0] for line in found] == [
        "app.yaml:3:12: applications[0].args.a: the variable PW is not set",
        "app.yaml:3:28: applications[0].args.b[0]: the variable OTHER is not set",
        (
            "app.yaml:3:40: applications[0].args.b[1]: '${bad-name}': must be ${NAME} or "
            "${NAME:-default}"
        ),
    ]


def test_the_value_of_a_variable_is_not_in_an_error(refused):
    (found,) = refused(APP + "    route_prefix: ${PW}", PW="secret")
    assert "secret" not in found
    assert "'${PW}'" in found


def test_what_is_shown_of_settings_is_what_was_written():
    secret = Expanded("u:secret@h", "u:${PW}@h")
    config = BackendConfig(user_config={"db": [secret], "n": 1})
    assert config.user_config["db"][0] == "u:secret@h"
    travelled = pickle.loads(pickle.dumps(config.model_dump()))
    assert travelled["user_config"]["db"] == ["u:secret@h"]
    assert config_shown(travelled)["user_config"] == {"db": ["u:${PW}@h"], "n": 1}
    assert "secret" not in repr(config) + json.dumps(config_shown(travelled))


def test_what_is_written_can_be_read(read):
    document = {"applications": [{"name": "a", "import_path": "mine:app", "args": {"x": "é"}}]}
    text = written(document)
    assert re.match(r"(#.*\n){2}applications:\n", text)
    assert read(text).applications[0].args == {"x": "é"}


def test_the_json_schema_knows_every_option_and_auto():
    schema = ServeDeploySchema.model_json_schema()
    deployment = schema["$defs"]["DeploymentSchema"]["properties"]
    assert deployment.keys() > BackendConfig.model_fields.keys()
    assert {"const": "auto"} in deployment["num_replicas"]["anyOf"]
    assert schema["$defs"]["ServeApplicationSchema"]["additionalProperties"] is False


def test_an_error_of_a_document_without_a_file_has_paths():
    with pytest.raises(InvalidDocumentError, match=r"^applications\[0\].import_path: must be giv"):
        read_document({"applications": [{}]})


@pytest.mark.parametrize(
    ("path", "read"),
    [
        ("shop:app", "shop:app"),
        ("shop.app", "shop:app"),
        ("a.shop.app", "a.shop:app"),
        ("a.shop:app", "a.shop:app"),
        ("shop", "shop"),
    ],
)
def test_a_path_with_dots_alone_ends_with_the_attribute_as_in_ray_serve(path, read):
    document = {"applications": [{"name": "a", "import_path": path}]}
    (application,) = ServeDeploySchema.model_validate(document).applications
    assert application.import_path == read

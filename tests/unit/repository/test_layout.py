import os
from pathlib import PurePosixPath, PureWindowsPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.repository.layout import FoundModel, ModelRepository, select_versions
from weir.repository.paths import check_folder_name, check_model_name, parse_version, path_inside, read_labels
from weir.repository.problems import ConfigProblem
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError


def make(root, *files):
    """Creates empty files below `root`; a name that ends in "/" is a folder."""
    for file in files:
        path = root / file
        if file.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    return root


def test_scan_finds_models_versions_and_configurations(tmp_path):
    make(
        tmp_path,
        "README.md",
        ".git/objects/",
        "b/config.pbtxt",
        "b/10/model.onnx",
        "b/9/model.onnx",
        "b/0/model.onnx",
        "b/007/model.onnx",
        "b/1.5/",
        "b/warmup/",
        "b/configs/small.pbtxt",
        "b/initial_state/",
        "b/labels.txt",
        "a/1/model.py",
        "empty/",
    )
    found = ModelRepository([tmp_path]).scan()
    assert list(found) == ["a", "b", "empty"]
    assert found["a"] == FoundModel("a", tmp_path / "a", versions=(1,))
    assert found["b"] == FoundModel("b", tmp_path / "b", "config.pbtxt", (0, 9, 10), ("007", "1.5"))
    assert found["empty"] == FoundModel("empty", tmp_path / "empty")


def test_config_name_chooses_among_configurations(tmp_path):
    make(tmp_path, "a/config.pbtxt", "a/configs/small.pbtxt", "b/config.pbtxt")
    found = ModelRepository([tmp_path], config_name="small").scan()
    assert found["a"].config_file == "configs/small.pbtxt"
    assert found["b"].config_file == "config.pbtxt"
    with pytest.raises(WeirError):
        ModelRepository([tmp_path], config_name="../a/config")


def test_a_model_in_two_repositories_is_served_from_neither(tmp_path):
    first, second = make(tmp_path / "r1", "a/1/", "b/1/"), make(tmp_path / "r2", "a/1/", "c/1/")
    repository = ModelRepository([first, second])
    found = repository.scan()
    assert found["a"].problem == "model appears in two or more repositories"
    assert found["b"].problem == found["c"].problem == ""
    assert found["c"].path == second / "c"
    assert repository.find("a") == found["a"]
    assert repository.find("c") == found["c"]


def test_a_folder_with_an_invalid_name_has_a_problem(tmp_path):
    make(tmp_path, "my model/1/")
    assert "invalid model name 'my model'" in ModelRepository([tmp_path]).scan()["my model"].problem


def test_unknown_models(tmp_path):
    with pytest.raises(WeirError) as caught:
        ModelRepository([tmp_path]).find("a")
    assert (caught.value.code, caught.value.message) == (
        ErrorCode.INTERNAL,
        "failed to load 'a', failed to poll from model repository",
    )
    with pytest.raises(WeirError) as caught:
        ModelRepository([tmp_path / "absent"]).scan()
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert str(tmp_path) not in caught.value.message


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../a", "a/b", "/etc", "a\\b", "a\0b", "a\nb", "-a", "a b", "ä", "x" * 129, "a;b", "a*", " "],
)
def test_invalid_names(tmp_path, name):
    with pytest.raises(WeirError) as caught:
        check_model_name(name)
    assert caught.value.code is ErrorCode.INVALID_ARG
    with pytest.raises(WeirError):
        ModelRepository([tmp_path]).find(name)


@pytest.mark.parametrize(
    "name",
    [
        "a",
        "...",
        "TestModel123",
        "model.onnxruntime",
        "_x",
        "0",
        "A-b_c.d",
        "x" * 128,
        "..my_model",
        ".a",
        "a..b",
        "a..",
    ],
)
def test_valid_names(name):
    check_model_name(name)


@given(st.text(st.sampled_from("./\\-_a\0\n %é"), max_size=8) | st.text(max_size=140))
def test_a_valid_name_never_leaves_its_folder(name):
    root = PurePosixPath("/repositories/one")
    try:
        check_model_name(name)
    except WeirError:
        return
    assert os.path.normpath(root / name) == f"{root}/{name}"
    assert (root / name).parent == root
    assert PureWindowsPath(name).parts == (name,)
    assert name.isascii()
    assert name.isprintable()


@pytest.mark.parametrize("name", [".git", "..data", "..my_model", "..."])
def test_hidden_folders_are_no_models(tmp_path, name):
    """Git keeps its data in one, and Kubernetes that of a mounted volume."""
    (tmp_path / name / "1").mkdir(parents=True)
    repository = ModelRepository([tmp_path])
    assert repository.scan() == {}
    assert not repository.has(name)
    with pytest.raises(WeirError, match=f"failed to load '{name}', failed to poll from model repository"):
        repository.find(name)
    with pytest.raises(WeirError, match=r"begin with '\.' are hidden"):
        check_folder_name(name)


def test_names_are_rejected_with_tritons_texts():
    with pytest.raises(
        WeirError,
        match=r"^INVALID_ARG: invalid model name '../a', model name must not contain path traversal characters$",
    ):
        check_model_name("../a")
    for blank in ("", " "):
        with pytest.raises(
            WeirError, match=r"^INVALID_ARG: Model name cannot be empty. Please enter a valid name to deploy.$"
        ):
            check_model_name(blank)
    with pytest.raises(WeirError, match=r"invalid model name '..\\a', model name must not contain path traversal"):
        check_model_name("..\\a")
    for name in ("model;test", "model\\test", "model'test'", "model!test"):
        with pytest.raises(
            WeirError, match=r"^INVALID_ARG: Invalid stub name: contains invalid characters\. invalid model name"
        ):
            check_model_name(name)


@pytest.mark.parametrize(
    "text, version",
    [
        ("0", 0),
        ("1", 1),
        ("9223372036854775807", 2**63 - 1),
        ("9223372036854775808", None),
        ("01", None),
        ("-1", None),
        ("1.0", None),
        ("", None),
        ("٣", None),
        ("1\n", None),
        ("v1", None),
    ],
)
def test_version_folders(text, version):
    assert parse_version(text) == version


@pytest.mark.parametrize(
    "policy, available, chosen",
    [
        (None, [1, 3, 2], [3]),
        ({}, [1, 2], [2]),
        ({"latest": {}}, [1, 2], [2]),
        ({"latest": {"num_versions": 2}}, [1, 10, 9], [9, 10]),
        ({"latest": {"num_versions": 5}}, [1, 2], [1, 2]),
        ({"all": {}}, [3, 0, 1], [0, 1, 3]),
        ({"specific": {"versions": [3, 1, 7]}}, [1, 2, 3], [1, 3]),
    ],
)
def test_version_policy(policy, available, chosen):
    assert select_versions(ModelConfig(version_policy=policy), available) == chosen


@pytest.mark.parametrize(
    "policy", [None, {"all": {}}, {"latest": {"num_versions": 3}}, {"specific": {"versions": [1]}}]
)
def test_version_policy_that_leaves_none(policy):
    with pytest.raises(
        WeirError,
        match=r"^INVALID_ARG: at least one version must be available under the version policy of model 'net'$",
    ) as caught:
        select_versions(ModelConfig(name="net", version_policy=policy), [2] if policy and "specific" in policy else [])
    assert caught.value.code is ErrorCode.INVALID_ARG


def test_links_may_stay_inside_and_not_lead_out(tmp_path):
    model = make(tmp_path / "repository", "net/..data/labels.txt", "net/1/model.onnx") / "net"
    outside = make(tmp_path, "secret/model.onnx") / "secret"
    (model / "labels.txt").symlink_to("..data/labels.txt")
    (model / "1" / "stolen.onnx").symlink_to(outside / "model.onnx")
    (model / "2").symlink_to(outside)
    (model / "loop").symlink_to("loop")
    found = ModelRepository([model.parent]).find("net")
    assert path_inside(model, "labels.txt") == model / "..data" / "labels.txt"
    assert found.artifact(1, "model.onnx") == model / "1" / "model.onnx"
    for leave in (
        lambda: found.artifact(1, "stolen.onnx"),
        lambda: found.version_dir(2),
        lambda: found.artifact(1, "../../../secret/model.onnx"),
        lambda: path_inside(model, "/etc/passwd"),
    ):
        with pytest.raises(ConfigProblem, match="must stay within the model's folder") as caught:
            leave()
        assert str(tmp_path) not in caught.value.message
    with pytest.raises(ConfigProblem, match="can't be resolved"):
        path_inside(model, "loop")


def test_a_model_folder_may_itself_be_a_link(tmp_path):
    make(tmp_path, "store/net/1/model.onnx", "repository/")
    (tmp_path / "repository" / "net").symlink_to(tmp_path / "store" / "net")
    found = ModelRepository([tmp_path / "repository"]).scan()["net"]
    assert found.artifact(1, "model.onnx") == tmp_path / "store/net/1/model.onnx"


def test_labels(tmp_path):
    (tmp_path / "labels.txt").write_bytes("Katze\r\n\nHund, groß\n".encode())
    assert read_labels(tmp_path, "labels.txt") == ["Katze", "", "Hund, groß"]
    (tmp_path / "broken.txt").write_bytes(b"\xff\n")
    for filename, reason in [
        ("absent.txt", os.strerror(2)),
        ("broken.txt", "not UTF-8"),
        ("../labels.txt", "stay within"),
    ]:
        with pytest.raises(ConfigProblem, match=reason) as caught:
            read_labels(tmp_path, filename)
        assert caught.value.field == "label_filename"


def test_with_namespacing_each_repository_has_its_own_model_of_a_name(tmp_path):
    a, b = make(tmp_path / "a", "twice/1/", "once/1/"), make(tmp_path / "b", "twice/2/")
    repository = ModelRepository([a, b], namespacing=True)
    first, second = f"{a}::twice", f"{b}::twice"
    found = repository.scan()
    assert list(found) == ["once", first, second]
    assert found["once"] == FoundModel("once", a / "once", versions=(1,), namespace=str(a))
    assert found[second] == FoundModel("twice", b / "twice", "", (2,), namespace=str(b), is_ambiguous=True)
    assert [model.identity for model in repository.find_all("twice")] == [first, second]
    assert repository.find(first) == found[first]
    assert repository.find("once") == found["once"]
    assert repository.has(first)
    assert repository.has("once")
    assert not repository.has("twice")
    for name in ("twice", f"{a}::once", f"{tmp_path}::twice", "nobody"):
        with pytest.raises(WeirError, match="failed to poll from model repository"):
            repository.find(name)
    assert repository.identities([first, "nobody", "once"]) == [first, second, "nobody", "once"]
    assert ModelRepository([a, b]).identities(["twice", "nobody"]) == ["twice", "nobody"]
    (b / "twice" / "2").rmdir()
    (b / "twice").rmdir()
    assert list(repository.scan()) == ["once", "twice"]
    assert repository.find("twice").namespace == str(a)


def test_a_repository_that_is_given_twice_is_one_namespace(tmp_path):
    make(tmp_path, "m/1/")
    assert list(ModelRepository([tmp_path, tmp_path], namespacing=True).scan()) == ["m"]

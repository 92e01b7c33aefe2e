"""Models of a store: which objects belong to which model, and which can't be files."""

from weir.repository.stores.store import StoredFile, group_models


def files(*paths: str, size_bytes: int = 1) -> list[StoredFile]:
    return [StoredFile(path, size_bytes, "tag") for path in paths]


def test_objects_are_grouped_by_model() -> None:
    models = group_models(files("b/1/model.onnx", "a/config.pbtxt", "b/config.pbtxt", "README", ".git/x", "b/12/x/y"))
    assert list(models) == ["a", "b"]
    assert [file.path for file in models["b"].files] == ["1/model.onnx", "12/x/y", "config.pbtxt"]
    assert (models["a"].versions, models["b"].versions) == ((), (1, 12))
    assert models["b"].size_bytes == 3
    assert not models["b"].problem


def test_marks_of_folders_are_no_files() -> None:
    """Consoles create empty objects for folders, whose names the library gives without the slash at the end."""
    models = group_models([*files("a/config.pbtxt", "b/1/x"), *files("a", "a/1", "b/1", "b", size_bytes=0)])
    assert [file.path for file in models["a"].files] == ["1/.folder", "config.pbtxt"]
    assert models["a"].versions == (1,), "a version of an ensemble is an empty folder"
    assert [file.path for file in models["b"].files] == ["1/x"]


def test_objects_that_can_not_be_files() -> None:
    for path in ("m/a\\b", "m/a//b", "m/\x01"):
        assert "can't be a file of a model" in group_models(files(path))["m"].problem
    assert "'1'" in group_models(files("m/1", "m/1/x"))["m"].problem, "a file and a folder of one name"
    assert group_models(files(*(f"m/{number}" for number in range(10_001))))["m"].problem == (
        "model 'm' has 10001 files, at most 10000 are allowed"
    )

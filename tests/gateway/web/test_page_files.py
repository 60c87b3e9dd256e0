import json
import re
from pathlib import Path

from gateway.web.routes.operations.page import _files
from tests.page.vendored import MANIFEST, VENDOR, sha256

MAX_TRANSFERRED = 160_000  # bytes of all files in gzip


def test_all_that_the_page_can_load_is_small_as_transferred() -> None:
    files = {name: each for name, each in _files().items() if not name.endswith(".txt")}
    assert {"vendor/languages/python.js", "vendor/temml.js", "engine.js"} <= set(files)
    assert sum(len(compressed) for _, compressed in files.values()) <= MAX_TRANSFERRED


def test_libraries_are_the_files_of_their_packages() -> None:
    manifest = json.loads(MANIFEST.read_text())
    files = {path.relative_to(VENDOR).as_posix() for path in VENDOR.rglob("*.*")}
    assert set(manifest) == files - {"manifest.json", "LICENSES.txt"}
    for name, entry in manifest.items():
        assert sha256((VENDOR / name).read_bytes()) == entry["sha256"], name
    licences = (VENDOR / "LICENSES.txt").read_text()
    names = {
        entry["package"].replace("@highlightjs/cdn-assets", "highlight.js")
        for entry in manifest.values()
    }
    assert all(f"{name}:" in licences or f"{name} (" in licences for name in names)


def test_every_import_is_a_file_of_the_page() -> None:
    files = _files()
    for name, (content, _) in files.items():
        if name.startswith("vendor/") or Path(name).suffix not in {".js", ".html"}:
            continue
        text = content.decode()
        wanted = re.findall(r'"/page/([^"$]+\.\w+)"', text)
        assert all(each in files for each in wanted), name
        assert not re.search(r"(src|href|from)=?\s*\"https?:", text), name

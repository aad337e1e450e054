"""What the page of images says of timm and of diffusers runs, where they are."""

import pytest

from docs.pages import ROOT, blocks_of


@pytest.mark.parametrize("library", ["timm", "diffusers"])
def test_the_page_of_images_runs(library):
    import integrations.torchvision_here  # noqa: F401

    pytest.importorskip(library, reason=f"{library} is not installed here: make test-vision brings it")
    blocks = [each for each in blocks_of(ROOT / "docs/vision.md") if f"polysketch.integrations.{library}" in each.code]
    assert len(blocks) == 1
    exec(compile(blocks[0].code, "docs/vision.md", "exec"), {})

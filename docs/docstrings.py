"""What the API pages do to docstrings: a formula such as <q, k> is text, not a tag; what only prints is left out."""

import re

import griffe

CODE_OR_TAG = re.compile(r"(`[^`]*`)|<(?=[A-Za-z/])")


FOR_PRINTING = "extra_repr"


class ForReaders(griffe.Extension):
    """Escape what Markdown would take for the beginning of a tag, outside code; hide what a module prints of itself."""

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        """Change the docstring of every object that is read."""
        if obj.docstring is not None:
            obj.docstring.value = CODE_OR_TAG.sub(lambda found: found[1] or "&lt;", obj.docstring.value)

    def on_class_members(self, *, cls: griffe.Class, **_: object) -> None:
        """Drop from a class what only prints."""
        cls.members.pop(FOR_PRINTING, None)

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        """List the class of every mechanism among the names of its package, which adds them from the table."""
        attention = pkg["attention"]
        imported = (member.name for member in attention.members.values() if member.is_alias)
        listed = [name for name in imported if name.endswith("Attention") and name not in attention.exports]
        attention.exports = [*attention.exports, *listed]

"""Pages from templates: HTML that contains its styles and fetches no file."""

import base64
import hashlib
from collections.abc import Mapping
from functools import partial
from importlib import resources
from typing import Any

import msgspec

from meshwright.ir import units
from meshwright.report import drawing, svg

ROOM = __name__.rpartition(".")[0]


def packaged(name: str, room: str = ROOM) -> str:
    """The text of a file of this package, or of the package ``room``."""
    return resources.files(room).joinpath(name).read_text(encoding="utf-8")


def _template(room: str, name: str) -> str | None:
    """The text of a template of the package ``room``, or of this package; None if there is none."""
    for place in (room, ROOM):
        file = resources.files(place).joinpath(name)
        if file.is_file():
            return file.read_text(encoding="utf-8")
    return None


def embedded(value: Any) -> str:
    """A value as JSON that can stand inside a ``script`` element: nothing in it ends the element."""
    text = msgspec.json.encode(value).decode()
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def script_digest(script: str) -> str:
    """The digest of an inline script, as a Content-Security-Policy names it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def rendered(name: str, pictures: Mapping[str, str], **values: Any) -> str:
    """Render the template ``name`` of this package with pictures (inserted as HTML) and values (escaped) by name.
    ``script`` and ``script_digest`` are the timeline's script, and its digest for a Content-Security-Policy."""
    return rendered_of(ROOM, name, pictures, values)


def rendered_of(room: str, name: str, pictures: Mapping[str, str], values: Mapping[str, Any]) -> str:
    """``rendered`` for a template of the package ``room``, which may use the templates of this package."""
    import jinja2  # imported here, because it is slow to import and few callers render
    from markupsafe import Markup

    script = packaged("timeline.js")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(partial(_template, room)),
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters |= {"seconds": units.seconds, "bytes": units.size, "dollars": drawing.dollars}
    environment.filters["bar"] = lambda percent: Markup(svg.bar(percent))
    environment.globals |= {"script": Markup(script), "script_digest": script_digest(script)}
    environment.filters["capitalized"] = lambda words: words[:1].upper() + words[1:]
    shown = {key: Markup(picture) for key, picture in pictures.items()}
    return environment.get_template(name).render(**shown, **values)

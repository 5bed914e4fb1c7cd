"""Pages from templates: HTML that contains its styles and fetches no file."""

from collections.abc import Mapping
from importlib import resources
from typing import Any

from meshwright.ir import units
from meshwright.report import drawing


def packaged(name: str) -> str:
    """The text of a file of this package."""
    return resources.files(__name__.rpartition(".")[0]).joinpath(name).read_text(encoding="utf-8")


def rendered(name: str, pictures: Mapping[str, str], **values: Any) -> str:
    """Render the template ``name`` of this package with pictures (inserted as HTML) and values (escaped) by name."""
    import jinja2  # imported here, because it is slow to import and few callers render
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(packaged),
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters |= {"seconds": units.seconds, "bytes": units.size, "dollars": drawing.dollars}
    environment.filters["capitalized"] = lambda words: words[:1].upper() + words[1:]
    shown = {key: Markup(picture) for key, picture in pictures.items()}
    return environment.get_template(name).render(**shown, **values)

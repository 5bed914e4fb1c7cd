"""Pages from templates: HTML with its styles in it, and nothing that is fetched."""

from collections.abc import Mapping
from importlib import resources
from typing import Any

from meshwright.ir import units
from meshwright.report import drawing


def rendered(name: str, pictures: Mapping[str, str], **values: Any) -> str:
    """The template ``name`` of this package, with pictures (HTML as it is) and values (escaped) under their names."""
    import jinja2  # here, so that whoever renders nothing does not wait for it
    from markupsafe import Markup

    here = resources.files(__name__.rpartition(".")[0])
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda file: here.joinpath(file).read_text(encoding="utf-8")),
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters |= {"seconds": units.seconds, "bytes": units.size, "dollars": drawing.dollars}
    environment.filters["capitalized"] = lambda words: words[:1].upper() + words[1:]
    shown = {key: Markup(picture) for key, picture in pictures.items()}
    return environment.get_template(name).render(**shown, **values)

"""From the MODEL and --pool of `fusion plan` and `fusion simulate` to what the planner takes.

Covers: shapes by name, models that are captured, pools from text, a file, or the broker. Not covered:
what their words mean (`planner/shapes.py`, `planner/pool.py`, `graph_target.py`).

Invariant: a shape on a pool from text or a file needs neither torch nor Dask.
"""

import json
import os
from pathlib import Path
from typing import Any, Final

from fusion_dask.planner.link_text import parse_link
from fusion_dask.planner.links import Link
from fusion_dask.planner.pool import Pool, parse_pool, pool_from_json
from fusion_dask.planner.records import ModelCost
from fusion_dask.planner.shapes import SHAPES, shape_cost
from fusion_flows.cli.errors import InputError

__all__ = ["LIVE", "read_json", "read_model", "read_pool"]

#: The pool that this home is a member of.
LIVE: Final = "live"
#: Tokens in a sequence of a model that is captured, as in `fusion graph`.
CONTEXT: Final = 256


def read_model(model: str, *, batch: int, context: int | None, dtype: str) -> ModelCost:
    """The cost of a model for one microbatch.

    Args:
        model: A shape, or what `fusion graph` takes.
        batch: Sequences in a microbatch.
        context: Tokens in a sequence; by default the longest of a shape, else `CONTEXT`.
        dtype: Of the matrix products.

    Raises:
        InputError: There is no such model.
        FusionError: It cannot be captured, or takes no such sequence.
    """
    if model in SHAPES:
        return shape_cost(SHAPES[model], batch=batch, context=context, dtype=dtype)
    if model != "gpt" and not Path(model.partition(":")[0]).exists():
        raise InputError(
            f"no model {model!r}: give one of {', '.join(SHAPES)}, gpt, a Hugging Face folder or "
            "config.json, or my/model.py:name"
        )
    # torch and transformers take seconds to import: not for a shape.
    from fusion_dask.graph.capture import capture
    from fusion_dask.graph.cost import annotate
    from fusion_dask.planner.model_cost import model_cost
    from fusion_flows.cli.graph_target import Sizes, load

    length = CONTEXT if context is None else context
    sizes = Sizes(batch=batch, context=length, layers=4, width=128, heads=4, vocab_size=256)
    module, inputs = load(model, sizes)
    return model_cost(annotate(capture(module, inputs)), name=model, dtype=dtype)


def read_pool(text: str, *, link: str | None, cluster: str | None) -> Pool:
    """The workers of a pool.

    Args:
        text: `live`, a file, or devices such as `50*rtx3080`.
        link: Between workers for which nothing else is known, such as `1gbit/20ms`.
        cluster: `HOST[:PORT]` of the live pool; the one of this home by default.

    Raises:
        InputError: The link or the file cannot be read, or there is no live pool or nobody in it.
        FusionError: A worker cannot be what is asked for, or the broker does not answer.
    """
    between = None if link is None else _link(link)
    if text == LIVE:
        pool = pool_from_json(_status(cluster), link=between)
        if not pool.workers:
            raise InputError(
                "nobody who was measured lends to the pool; wait for `fusion status` to show active "
                "workers, or give --pool such as 50*rtx3080"
            )
        return pool
    if text.endswith(".json") or Path(text).is_file():
        return pool_from_json(read_json(Path(text), "--pool"), link=between)
    return parse_pool(text, link=between)


def read_json(path: Path, option: str) -> Any:  # noqa: ANN401 - JSON
    """A JSON file that an option names.

    Raises:
        InputError: It cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{option} {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"{option} {path}: not JSON: {error}") from None


def _link(text: str) -> Link:
    try:
        return parse_link(text)
    except ValueError as error:
        raise InputError(f"--link: {error}") from None


def _status(cluster: str | None) -> Any:  # noqa: ANN401 - JSON
    from fusion_flows.cli.membership import as_member, known_pool
    from fusion_tasks import settings

    identity = known_pool(settings.current().home, cluster)
    os.environ.update(as_member(identity))
    # Dask reads its credentials from the environment when it is imported.
    from fusion_flows.cli.scheduler import ask

    return ask(identity.scheduler, "fusion_status")

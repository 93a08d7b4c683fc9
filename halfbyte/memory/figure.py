"""Plans as stacked bars."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfbyte.memory.plan import MemoryPlan

__all__ = ["draw"]


def draw(plans: Mapping[str, MemoryPlan], file: str | Path) -> None:
    """One horizontal bar per plan, its kinds stacked, each labelled where there is room.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("MemoryPlan.plot needs matplotlib; pip install matplotlib") from error
    kinds: dict[str, int] = {}
    for plan in plans.values():
        for row in plan.rows:
            kinds[row.what] = max(kinds.get(row.what, 0), row.bytes)
    widest = max(plan.peak_bytes for plan in plans.values())
    unit, scale = ("GB", 1e9) if widest >= 1e9 else ("MB", 1e6)
    figure = Figure(figsize=(9, 1.8 + 0.55 * len(plans)), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    ends = dict.fromkeys(plans, 0.0)
    for index, what in enumerate(sorted(kinds, key=lambda kind: -kinds[kind])):
        sizes = {name: sum(r.bytes for r in plan.rows if r.what == what) / scale for name, plan in plans.items()}
        color = f"C{index}" if index < 10 else "0.6"
        axes.barh(list(plans), list(sizes.values()), left=list(ends.values()), label=what, color=color, edgecolor="white")
        for name, size in sizes.items():
            if size * scale > 0.07 * widest:
                middle = ends[name] + size / 2
                axes.text(middle, name, f"{size:.3g}", ha="center", va="center", color="white", fontsize=9)
            ends[name] += size
    for name, end in ends.items():
        axes.text(end + 0.01 * widest / scale, name, f"{end:.3g} {unit}", va="center", fontsize=9)
    axes.set_xlim(0, 1.12 * widest / scale)
    axes.set_xlabel(f"{unit} per rank at the peak of a training step")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    below = (0.5, -0.28 if len(plans) < 4 else -0.16)
    axes.legend(loc="upper center", bbox_to_anchor=below, ncols=3, frameon=False, fontsize=9)
    figure.savefig(file, dpi=130)

"""Counts updates and skips, and says when skips are too many."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ..capture import warn_user
from ..errors import NonFiniteError
from ..graph.ops import NONFINITE_LOSS
from .loss_scale import Scaler
from .options import StepOptions

logger = logging.getLogger("stepgraph")


@dataclass
class Tally:
    """What became of the updates so far.

    Attributes:
        updates: applied and skipped.
        skips: those that were left out.
        skips_in_a_row: since the last that was applied.
    """

    updates: int = 0
    skips: int = 0
    skips_in_a_row: int = 0

    def applied(self) -> None:
        """An update was applied."""
        self.skips_in_a_row = 0

    def not_finite(
        self,
        number: int,
        code: int,
        reason: str,
        parameter: str | None,
        options: StepOptions,
        scaler: Scaler | None,
    ) -> None:
        """The update with this number was left out, since something was not finite.

        Raises:
            NonFiniteError: the options ask for it, or too many were left out in a row.
        """
        if options.nonfinite != "skip" or (options.error_if_nonfinite and code != NONFINITE_LOSS):
            raise NonFiniteError(
                f"step {number}: {reason}. Parameters and optimizer state are unchanged. "
                "step.find_nonfinite(batch) names the operator that made it.",
                parameter,
            )
        self.skipped(number, reason)
        self.skips_in_a_row += 1
        count = self.skips_in_a_row
        if count not in (options.skips_before_warning, options.skips_before_error):
            return
        where = "" if scaler is None else f" The loss scale is {scaler.value:g}."
        what = (
            f"step {number}: {count} updates in a row were skipped, the last since {reason}.{where} Parameters and "
            "optimizer state are unchanged since. step.find_nonfinite(batch) names the operator that made it."
        )
        if count == options.skips_before_error:
            self.skips_in_a_row = 0
            raise NonFiniteError(what, parameter)
        warn_user(what)

    def skipped(self, number: int, reason: str) -> None:
        """The update with this number was left out."""
        self.skips += 1
        logger.warning("step %d: the update is skipped, since %s", number, reason)

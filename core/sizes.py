"""How many replicas a backend is to have: a number of its settings, or what autoscaling makes it.

The autoscaled number is the record's ``target``, so that it outlives the controller; it is no part
of the settings, so that neither history nor a replica hears of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from greenroom.core.autoscaling import first_target
from greenroom.core.config import BackendConfig
from greenroom.core.records import BackendRecord
from greenroom.core.scaling_config import AutoscalingConfig


class Sized:
    """A backend's record and its settings, as far as they say how many replicas there should be.

    ``changed`` is set when the record was replaced and needs saving.
    """

    def __init__(self, record: BackendRecord) -> None:
        self.record = record
        self.config = BackendConfig(**record.config)
        self.changed = False
        self.rescaling = ""  # while replicas come or go for that alone: UPSCALING or DOWNSCALING
        if self.config.autoscaling_config is not None and record.target is None:
            self.update(target=first_target(self.config.autoscaling_config, None, 0))

    def update(self, **changes: Any) -> None:
        """Replace fields of the record."""
        self.record = replace(self.record, **changes)
        self.changed = True

    @property
    def wanted(self) -> int:
        """How many replicas there should be."""
        return 0 if self.record.deleting or self.record.failure else self.target

    @property
    def target(self) -> int:
        """How many replicas there should be, were it not deleted or given up."""
        return self.config.num_replicas or self.record.target or 0

    @property
    def autoscaled_by(self) -> AutoscalingConfig | None:
        """The settings of autoscaling, where it decides on the number of replicas."""
        is_over = self.record.deleting or self.record.failure
        return None if is_over else self.config.autoscaling_config

    @property
    def names(self) -> tuple[str, str]:
        """The names of its deployment and of its application, if it has any."""
        return self.record.deployment, self.record.application

    def rescale(self, target: int) -> None:
        """Make this the number of replicas that there should be, as autoscaling has decided."""
        before = self.target
        self.update(target=target)
        self.note_rescaling(before)

    def target_with(self, config: BackendConfig, *, anew: bool = False) -> int | None:
        """Return the record's target for other settings; ``anew`` as if it had run no replica."""
        scaling = config.autoscaling_config
        if scaling is None:
            return None
        before = None if anew else self.config.autoscaling_config
        return first_target(scaling, before, 0 if anew else self.target)

    def note_rescaling(self, before: int) -> None:
        """Say that replicas come or go, where the target is another than ``before``."""
        if self.target != before:
            self.rescaling = "UPSCALING" if self.target > before else "DOWNSCALING"

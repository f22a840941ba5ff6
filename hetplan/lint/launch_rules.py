"""Every rule about launches of a trainer, in the order of `hetplan check --rules`."""

from __future__ import annotations

from hetplan.lint import (
    launch_rules_batch,
    launch_rules_flags,
    launch_rules_flagscale,
    launch_rules_hosts,
    launch_rules_layers,
    launch_rules_memory,
    launch_rules_script,
    launch_rules_sizes,
    launch_rules_torchtitan,
)

RULES = (
    *launch_rules_script.RULES,
    *launch_rules_layers.RULES,
    *launch_rules_memory.RULES,
    *launch_rules_hosts.RULES,
    *launch_rules_sizes.RULES,
    *launch_rules_batch.RULES,
    *launch_rules_flags.RULES,
    *launch_rules_flagscale.RULES,
    *launch_rules_torchtitan.RULES,
)

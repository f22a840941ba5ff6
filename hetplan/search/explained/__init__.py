"""Why a plan is as fast as it is: what limits it, what more would help, why not another one."""

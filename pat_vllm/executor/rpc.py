"""Names of the calls that travel between an engine's processes. Imports nothing."""

# From a front end to the engine core, as `collective_rpc(name)`; see
# `PATExecutorMixin.register_command`.
SWITCH_COMMAND = "pat_switch_layout"
SPECULATE_COMMAND = "pat_speculate"
REPORT_COMMAND = "pat_report"
PROFILE_COMMAND = "pat_profile"

# From the engine core to the workers; methods of `PATWorkerMixin`.
OPEN_LANES = "pat_open_lanes"
LANES_READY = "pat_lanes_ready"
SERVE_LANE = "pat_serve_lane"
SWITCH = "pat_switch"
CALL_IN_BASE = "pat_call_in_base"
REFRESH_WEIGHTS = "pat_refresh_weights"
TRANSFER_RATES = "pat_transfer_rates"
RESOLVED_KERNELS = "pat_resolved_kernels"
RESEED = "pat_reseed"
ECHO = "pat_echo"
WORKER_METHODS = frozenset(
    {
        OPEN_LANES,
        LANES_READY,
        SERVE_LANE,
        SWITCH,
        CALL_IN_BASE,
        REFRESH_WEIGHTS,
        TRANSFER_RATES,
        RESOLVED_KERNELS,
        RESEED,
        ECHO,
    }
)

"""Expert parallelism: the experts of a layer spread over the ranks of a torch.distributed process group.

layer = rx.parallel.ExpertParallel(experts, process_group, dispatch="all_to_all")
output = layer(hidden_states, top_k_index, top_k_weights)  # ids count the experts of all ranks

expert_parallel.py  the callable, its checks
engine.py           agree, then run; for any function that computes a rank's rows
header.py           what ranks tell each other before rows are sent, and how it is checked
link.py             a process group whose every wait ends in time
plan.py             which rows go where: Rust on a CPU, plan_device.py elsewhere
all_reduce.py       every rank holds the batch
all_to_all.py       rows travel, over exchange.py's autograd functions
load.py, traffic.py how evenly ranks are loaded; a model of bytes and memory
"""

from routed_experts.parallel.errors import RankError
from routed_experts.parallel.expert_parallel import ExpertParallel
from routed_experts.parallel.load import LoadReport
from routed_experts.parallel.plan import DispatchPlan, plan_dispatch
from routed_experts.parallel.traffic import Traffic, traffic

__all__ = ["DispatchPlan", "ExpertParallel", "LoadReport", "RankError", "Traffic", "plan_dispatch", "traffic"]

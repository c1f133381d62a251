"""Everything that PAT does to vLLM's objects from outside, by what it is done to.

Each patch is a function or a context manager. Its docstring says what breaks without it, and which
seam vLLM lacks. To apply a patch twice does no harm. A replaced method keeps the original as
`__wrapped__`; a context manager restores what it replaced. A patch that mends a mistake of vLLM's
names the issue, where there is one, and says with what the patch goes.

Not here, because vLLM offers a seam for it: PAT's executor, workers, scheduler, connector and
model loaders are subclasses; `support.py` names them in an engine's config;
`worker/layout_config.py` changes copies of that config; `kv_transfer/kv_buffer.py` answers an
allocation inside a context that vLLM enters. Nor here: the state of the requests that a switch
carries, which `scheduler/switching/switch.py` and `worker/request_state.py` write.

The vLLM plugin imports `front_end.py` in each of vLLM's processes, whether they use PAT or not. So
these modules import neither vLLM nor torch before a patch is applied.
"""

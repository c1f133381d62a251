# ruff: noqa: E501  # pieces of source stay whole
"""Mistakes in options, limits, the plugin, files, memory arithmetic, layouts' configs, bundles."""

from __future__ import annotations

from tests.nightly.mutations.mutation import Mutation

CONFIG = "pat_vllm.config"
POLICY_CONFIG = "pat_vllm.policy_config"
OPTIONS = f"{CONFIG}:PATConfig"
LIMITS = "pat_vllm.limits"
SUPPORT = "pat_vllm.support"
REFUSED = "pat_vllm.refused"
PLUGIN = "pat_vllm.plugin"
MIXTURE = "pat_vllm.mixture:Mixture"
FILES = "pat_vllm.files.writing"
READING = "pat_vllm.files.reading"
TEXT_ONLY = "pat_vllm.text_only"
BUFFERS = "pat_vllm.memory.buffers"
SHAPE = "pat_vllm.memory.model:ModelShape"
SIZE = "pat_vllm.model_size:ModelSize"
ESTIMATE = "pat_vllm.memory.estimate"
ARITHMETIC = "pat_vllm.doctor.arithmetic"
LAYOUT_CONFIG = "pat_vllm.worker.layout_config"
CHOICE = "pat_vllm.simulator.modelled.choice"
BUNDLES = "pat_vllm.executor.bundles"
LAUNCHER = "pat_vllm.executor.launcher"
ALLOCATED = "tests/engine/test_memory.py::test_an_engine_allocates_what_is_computed"

# Test files: functions: mistakes: what they change.
# fmt: off
TABLE: dict[str, dict[str, dict[str, dict[str, str]]]] = {
    "tests/unit/simulator/modelled/test_batch_time.py": {
        "pat_vllm.simulator.modelled.batch_time:Load.tokens_per_step": {
            "drafts of all responses are accepted alike": {"0 < self.acceptance < 1": "False"},
        },
    },
    "tests/unit/simulator/modelled/test_choice.py": {
        "pat_vllm.simulator.modelled.batch_time:Load.usual": {
            "vLLM's own limit is a load": {"min(max_num_seqs, USUAL_SEQS)": "max_num_seqs"},
        },
        f"{CHOICE}:_Search.fits": {
            "a request need not fit": {">= self.engine.max_model_len": ">= 0"},
        },
        f"{CHOICE}:_Search.by_rule": {
            "weights may fill a device": {"_LARGEST_WEIGHTS * self.device.memory": "self.device.memory"},
        },
        f"{CHOICE}:_Search.experts": {
            "layouts that the policy names are not kept": {'if "ep" in kinds': "if False"},
        },
        f"{CHOICE}:_Search.warning": {
            "far less KV than static is not told": {"memory.kv < _FAR_LESS * most": "False"},
        },
        "pat_vllm.gpus:known_gpu": {
            "a part of a GPU is a whole one": {"near and named": "named"},
            "a GPU of another name is known": {"near and named": "near"},
        },
    },
    "tests/vllm/test_layout_choice.py": {
        f"{SUPPORT}:_choose_layouts": {
            "layouts are chosen anew": {"chosen(vllm_config)": "False"},
            "what is chosen is not written down": {"_set_options(vllm_config, choice.options, ": "_set_options(vllm_config, {}, "},
        },
    },
    "tests/unit/test_config.py": {
        f"{POLICY_CONFIG}:_layout_name": {
            "what is no number is a layout": {"isinstance(value, str) and tp is None": "tp is None"},
        },
        f"{POLICY_CONFIG}:_number": {
            "true is a layout": {"type(value) is int": "isinstance(value, int)"},
        },
        f"{POLICY_CONFIG}:_each_once": {
            "of two values for one number, one is lost": {"count > 1": "count > 2"},
        },
        f"{CONFIG}:_describe": {
            "a value is printed whole": {"value {shown(error['input'])}: ": "value {error['input']!r}: "},
        },
        f"{OPTIONS}._sizes": {
            "layouts need not be multiples of the base layout": {"if tp % self.base:": "if tp % 1:"},
            "the base layout is not kept ready": {"{*self.layouts, self.base}": "{*self.layouts}"},
            "all ranks in one group only if they are a power of two": {"sizes = {world_size}": "sizes = set()"},
        },
        f"{OPTIONS}.largest_batch": {
            "the base layout has a limit, too": {" or layout.tp == self.base": ""},
            "the smallest batch of a tp": {"return max(": "return min("},
        },
        f"{OPTIONS}.policy_names": {
            "draft lengths of layouts that are not kept ready": {"(*policy.switch_at.values(), *policy.num_speculative_tokens)": "(*policy.switch_at.values(),)"},
        },
        f"{CONFIG}:home_layout": {
            "every engine starts in its base layout": {"Layout.find(policy.tp, layouts)": "layouts[0]"},
        },
    },
    "tests/unit/test_limits.py": {
        f"{LIMITS}:layout_limits": {
            "a replica's limits are a rank's": {'config.limits_per == "replica"': "True"},
            "limits per replica are not looked at": {'config.limits_per == "replica"': "False"},
            "requests grow without end": {"min(layout.tp * given.max_num_seqs, max(given.max_num_seqs, enough))": "layout.tp * given.max_num_seqs"},
            "tokens grow without end": {"max(given.max_num_batched_tokens, MOST_BATCHED_TOKENS, ": "max(10**6, 1, "},
            "fewer requests than the user gave": {"max(given.max_num_seqs, enough)": "enough"},
            "room for requests that the policy never brings": {"MOST_SEQS if enters_with is None else min(MOST_SEQS, enters_with)": "MOST_SEQS"},
            "drafts have no tokens": {"seqs * tokens_per_seq": "seqs"},
        },
        f"{LIMITS}:narrower_limit": {
            "the narrower limit stays": {'layout.tp if config.limits_per == "rank" else 1': "1"},
            "the narrower limit is the wider": {", limit)": ", 10**9)"},
        },
    },
    "tests/unit/test_mixture.py": {
        f"{MIXTURE}.layouts": {
            "both kinds of layouts where no rank has a whole expert": {'wanted == "auto" and base_tp > 1': 'wanted == "auto" and base_tp > 2'},
        },
        f"{MIXTURE}._hindrance": {
            "one expert for each rank is too few": {"self.num_experts < tp": "self.num_experts <= tp"},
            "experts that a rank of the base layout lacks": {"base_tp > 1 and self.num_experts % tp": "base_tp > tp and self.num_experts % tp"},
        },
    },
    "tests/unit/test_files.py": {
        f"{FILES}:_write_whole": {
            "kept files are open to others": {"0o600 if private else 0o666": "0o666"},
            "a file is written in place": {"os.replace(scratch, path)": "path.write_text(text)"},
            "half a file is left behind": {"os.unlink(scratch)": "pass"},
            "a file takes its name before it is on the disk": {"os.fsync(descriptor)": "pass"},
            "a file is not written out": {"file.flush()": "pass"},
            "a file is written through another's link": {" | os.O_EXCL | os.O_NOFOLLOW": ""},
            "a device becomes a file": {"if not stat.S_ISREG(os.stat(path).st_mode):": "if False:"},
            "what killed writers leave stays": {"sweep(path.parent, now, re.escape(path.name))": "pass"},
        },
        f"{FILES}:forgotten": {
            "what is being written is removed": {"now - _FORGOTTEN": "now + _FORGOTTEN"},
        },
        f"{FILES}:make_private": {
            "an open directory stays open": {"os.fchmod(descriptor, 0o700)": "pass"},
            "a link is followed": {" | os.O_NOFOLLOW": ""},
            "another user's directory is taken": {"status.st_uid != os.geteuid()": "False"},
        },
        f"{READING}:read_bytes": {
            "a pipe is read": {"if not stat.S_ISREG(status.st_mode):": "if False:"},
            "another user's file is taken": {"own and status.st_uid != os.geteuid()": "False"},
        },
        f"{READING}:parse_json": {
            "JSON is nested without end": {"return from_json(text.removeprefix": "return __import__('json').loads(text.removeprefix"},
        },
        f"{READING}:without_digest": {
            "damage is not seen": {"content.get(DIGEST) != digest_of(rest)": "False"},
        },
        "pat_vllm.profiling.cache:cache_dir": {
            "no home, no engine": {"except RuntimeError as error:": "except KeyError as error:"},
        },
        "pat_vllm.profiling.cache:find": {
            "a cache that cannot be read stops an engine": {"except (ProfileError, OSError) as error:": "except ProfileError as error:"},
        },
        "pat_vllm.profiling.cache:keep": {
            "cached profiles are open to others": {", private=True": ""},
            "the cache is open to others": {"make_private(path.parent)": "path.parent.mkdir(exist_ok=True)"},
        },
        "pat_vllm.predictor.kept:Keeper.save": {
            "a name that no file can have stops an engine": {"except (OSError, ValueError) as error:": "except KeyError as error:"},
        },
        "pat_vllm.predictor.kept:save": {
            "kept lengths are open to others": {", private=True": ""},
            "kept lengths are written in place": {"write_whole(path, ": "path.write_text(", ", private=True": ""},
        },
    },
    "tests/unit/test_security.py": {
        f"{TEXT_ONLY}:command_of": {
            "children import from the current directory": {'"-P", ': ""},
        },
        f"{TEXT_ONLY}:command_without_vision_and_audio": {
            "models are looked at beside the current directory": {'"-P", ': ""},
        },
        f"{TEXT_ONLY}:starting_with_safe_path": {
            "spawned processes import from the current directory": {"os.environ.update(SAFE_PATH)": "pass"},
        },
        "pat_vllm.child:run_module": {
            "engines' workers import from the current directory": {", **SAFE_PATH": ""},
        },
    },
    "tests/unit/memory/test_estimate.py": {
        f"{SIZE}.kv_elements": {
            "keys without values": {"2 * max(": "max("},
            "KV heads are cut beyond one": {"max(1, self.kv_heads // tp)": "self.kv_heads / tp"},
            "latent vectors are cut": {"self.latent.rank + self.latent.rope": "(self.latent.rank + self.latent.rope) // tp"},
        },
        f"{SHAPE}.latent_workspace_bytes": {
            "a workspace for any number of tokens": {"min(tokens, 64 << 10)": "tokens"},
        },
        f"{BUFFERS}:all_buffers": {
            "a shared buffer for each layout": {"if not one.shared": ""},
            "the smallest of shared buffers": {"max(alike": "min(alike"},
        },
        f"{BUFFERS}:runner_buffers": {
            "block tables are forgotten": {"Buffer(2 * table, with_kv=True)": "Buffer(0, with_kv=True)"},
            "embeddings for each layout": {"Buffer(embeddings, embeddings, shared=True)": "Buffer(embeddings, embeddings)"},
            "an attention workspace for each layout": {"Buffer(workspace, shared=True, with_kv=True)": "Buffer(workspace, with_kv=True)"},
            "a bitmask of grammars for each layout": {"* mask, shared=True": "* mask"},
            "penalty counters for each layout": {"(model.vocab + mask), shared=True": "(model.vocab + mask)"},
            "token ids are pinned for a drafter on the device": {"Buffer(token_ids if drafts else 0, 0 if drafts else token_ids, shared=True)": "Buffer(0, token_ids, shared=True)"},
            "tokens of the drafter for each layout": {"Buffer(searched, shared=True)": "Buffer(searched)"},
        },
        f"{ESTIMATE}:staged_share": {
            "a layer is staged in both directions": {"2 / ROUNDS": "1"},
        },
        f"{ESTIMATE}:kv_cache_bytes": {
            "a switch has no memory of its own": {"available if available * staged <= activations else int(left / (1 + staged))": "available"},
            "graphs are not subtracted": {"- graphs ": ""},
            "activations of one layout only": {"max(one.activations for one in layouts)": "last.activations"},
        },
        f"{ESTIMATE}:estimate": {
            "a group for each kind of experts": {"{one.tp for one in layouts if one.tp > 1 and one.replicas > 1}": "[one.tp for one in layouts if one.tp > 1 and one.replicas > 1]"},
            "weights in place are counted for each layout": {"layouts[:1] if in_place else layouts": "layouts"},
            "copies of weights are counted once": {"layouts[:1] if in_place else layouts": "layouts[:1]"},
            "graphs of the base layout only": {"for one in limits)": "for one in limits[:1])"},
            "a wide layout holds as many tokens as the base layout": {"model.kv_bytes_per_token(one.tp)))": "model.kv_bytes_per_token(layouts[0].tp)))"},
            "a user's KV memory is ignored": {"engine.kv_cache_memory_bytes or kv_cache_bytes(": "kv_cache_bytes("},
        },
        f"{ESTIMATE}:communicator_bytes": {
            "buffers for multicast on every GPU": {' or not device.capability.startswith("9.")': ""},
        },
        f"{ESTIMATE}:_graph_bytes": {
            "piecewise graphs alone": {" + _captures(tokens)": ""},
        },
        "pat_vllm.simulator.modelled.hardware:_kv_tokens": {
            "PAT's simulated engine has the memory of static ones": {"if not static:": "if False:"},
            "static engines hold the base layout's weights": {"if not static:": "if True:"},
        },
        f"{ARITHMETIC}:check_memory": {
            "the doctor states tokens of the widest layout": {"shape.layouts[0].tp]": "shape.layouts[-1].tp]"},
        },
    },
    "tests/vllm/memory/test_windows.py": {
        f"{ESTIMATE}:_kv_share": {
            "layers that a group lacks take no memory": {"-(-layers // size) * size": "layers"},
            "windows are forgotten": {"min(tokens, model.window + block_size)": "tokens"},
        },
    },
    "tests/unit/test_model_size.py": {
        "pat_vllm.model_size:LatentSizes.weights": {
            "what makes latent vectors is cut": {"return replicated +": "return heads / 16 * replicated +"},
        },
        f"{SIZE}.attention_operations": {
            "decode steps make keys and values": {"elif decode:": "elif not decode:"},
        },
        "pat_vllm.model_size:_has_experts": {
            "every layer has experts": {'layer % (size_of(config, "moe_layer_freq") or 1)': "False"},
        },
    },
    "tests/unit/advice/test_advise.py": {
        "pat_vllm.advice.rollouts:_chosen": {
            "layouts are chosen for the usual load": {", load=Load.of(first)": ""},
        },
    },
    "tests/vllm/memory/test_mixtures.py": {
        f"{SIZE}.resident_weights": {
            "spread experts are cut": {"self.experts.most_on_rank(tp) if spread else self.experts.count / tp": "self.experts.count / tp"},
        },
        f"{SIZE}.layer_weights": {
            "shared experts are forgotten": {"router + 3 * self.experts.shared / tp": "router"},
            "dense layers have experts": {"self.dense_layers *": "0 *"},
        },
        f"{SHAPE}.expert_workspace_bytes": {
            "a workspace for gate without up": {"max(2 * width,": "max(width,"},
        },
    },
    f"{ALLOCATED}[copies]": {
        f"{SHAPE}.weight_bytes": {
            "weights have two bytes": {"* self.dtype_bytes": "* 2"},
        },
        f"{SIZE}.resident_weights": {
            "embeddings are forgotten": {"(1 if self.tied else 2)": "0"},
        },
        f"{SHAPE}.kv_bytes_per_token": {
            "KV has two bytes": {"* self.kv_dtype_bytes": "* 2"},
        },
        f"{ESTIMATE}:staged_share": {
            "two layers are staged": {"max(1,": "max(2,"},
        },
        f"{BUFFERS}:runner_buffers": {
            "small buffers are forgotten": {"small = _OF_TOKEN * tokens": "small = 0"},
        },
    },
    f"{ALLOCATED}[latent]": {
        "pat_vllm.patches.runners:use_attention_workspace": {
            "a workspace of latent vectors for each layout": {"len(own) <= len(workspace)": "False"},
        },
    },
    f"{ALLOCATED}[large V2]": {
        f"{BUFFERS}:runner_buffers": {
            "sampling state is forgotten": {"Buffer(seqs * _SAMPLING + small)": "Buffer(small)"},
        },
    },
    "tests/vllm/test_bad_input.py": {
        f"{REFUSED}:unsupported": {
            "prefill context parallelism is not refused": {"for rule in RULES\n": "for rule in RULES if rule.option != 'prefill_context_parallel_size'\n"},
            "options of mixtures are not refused": {"(is_mixture or not rule.mixtures)": "not rule.mixtures"},
        },
        f"{REFUSED}:_equal": {
            "a transfer of weights that vLLM runs under Ray only": {"_at(vllm_config, path) == value": "False"},
        },
        f"{REFUSED}:_images": {
            "classes are served with their towers": {"False if not only": "None if not only"},
            "limits of 0 do not count as text alone": {" and model.supports_multimodal_inputs": ""},
        },
        f"{REFUSED}:_variable": {
            "an all-reduce of one group in a process is not refused": {"getattr(envs, name)": "False"},
        },
        f"{REFUSED}:_numa_bind": {
            "NUMA binding is refused where ranks are in order": {"parallel.numa_bind and any(device_of(rank, ranks) != rank for rank in range(ranks))": "parallel.numa_bind"},
        },
        f"{SUPPORT}:prepare": {
            "bad files are found by the scheduler": {"_check_files(pat_config(vllm_config).policy)": "pass"},
        },
        f"{SUPPORT}:_choose_experts": {
            "packed copies of both kinds of experts": {'if (experts := pat_config(vllm_config).experts) == "auto":': 'if (experts := pat_config(vllm_config).experts) == "none":'},
        },
    },
    "tests/vllm/test_plugin.py": {
        f"{PLUGIN}:check_vllm_version": {
            "the first untested version passes": {"first <= version < past": "first <= version <= past"},
            "0 allows untested versions": {'os.environ.get(ALLOW_UNTESTED) == "1"': "os.environ.get(ALLOW_UNTESTED)"},
        },
        f"{PLUGIN}:_warn_of_unread_options": {
            "options that are not read are passed over": {'if "pat" in additional': 'if "PAT" in additional'},
        },
        "pat_vllm.api:_check_runs_pat": {
            "a call is sent to an engine without PAT": {"if not runs_pat(vllm_config):": "if False:"},
        },
        f"{PLUGIN}:register": {
            "vLLM never looks at vision models": {"if is_without_vision_and_audio():": "if True:"},
        },
        f"{PLUGIN}:_executor_class": {
            "executors given as a class are not prepared": {'getattr(chosen, "is_pat", False)': "vllm_config.parallel_config.distributed_executor_backend == BACKEND"},
        },
    },
    "tests/unit/cli/test_demo.py": {
        "pat_vllm.cli.demo:verdict": {
            "noise is a gain": {"if abs(change) <= noise:": "if False:"},
            "figures of a busy machine are compared": {"if spread(runs) > _MOST_SPREAD:": "if False:"},
        },
    },
    "tests/gpuless/test_compile_keys.py": {
        f"{LAYOUT_CONFIG}:layout_config": {
            "replicas share a compile cache": {"data_parallel_index = layout.replica_of(rank)": "data_parallel_index = 0"},
            "layouts share the user's folder of compiled code": {"config.compilation_config.cache_dir = folder": "pass"},
        },
    },
    "tests/gpuless/test_layouts_in_updates.py": {
        f"{LAYOUT_CONFIG}:layout_config": {
            "a rank is one of the engine's": {"layout.tp_rank_of(rank)": "rank"},
        },
    },
    "tests/gpuless/test_capture_sizes.py": {
        f"{LAYOUT_CONFIG}:_limit_cuda_graphs": {
            "graphs for one size too many": {"if size >= tokens": "if size > tokens"},
        },
    },
    "tests/unit/executor/test_bundles.py": {
        f"{BUNDLES}:choose_bundles": {
            "the engine's node is not preferred": {"engine_node if engine_node in enough else enough[0]": "enough[0]"},
            "a node has one bundle more than there are ranks": {"len(bundles) >= ranks": "len(bundles) > ranks"},
            "bundles in the order of the placement group's table": {"sorted(nodes.items())": "nodes.items()"},
        },
        f"{BUNDLES}:_checked": {
            "a bundle for two ranks": {" or len(set(wanted)) != ranks": ""},
            "wanted bundles on several nodes": {"len(by_node) > 1": "len(by_node) > ranks"},
        },
    },
    "tests/vllm/executor/test_launcher.py": {
        f"{LAUNCHER}:_in_placement_group": {
            "Ray where its devices have no name": {"if not _platform_device():\n        return False": "pass"},
        },
        f"{LAUNCHER}:prepare_launch": {
            "an executor that the option contradicts": {'launcher not in ("auto", own)': 'launcher not in ("auto", own, "ray")'},
        },
    },
}
# fmt: on

MUTATIONS = [
    Mutation(name, function, changes, (tests,))
    for tests, functions in TABLE.items()
    for function, mistakes in functions.items()
    for name, changes in mistakes.items()
]

"""The keys, the meaning of each, and its goal and floor. Below the floor the work is not done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Goal:
    """One key of `latest.json`."""

    key: str
    """Its name; `_min` and `_max` beside it are the lowest and highest round."""

    meaning: str
    """What it says."""

    goal: float | None = None
    """What was aimed at; None for a key that only stands beside another."""

    floor: float | None = None
    """What must be reached."""

    less_is_better: bool = False
    """Whether goal and floor are upper bounds."""

    def reached(self, measured: float) -> str:
        """Return `goal`, `floor` or `missed`; an empty text for a key without goal and floor."""
        if self.goal is None or self.floor is None:
            return ""
        sign = -1 if self.less_is_better else 1
        if sign * measured >= sign * self.goal:
            return "goal"
        return "floor" if sign * measured >= sign * self.floor else "missed"


def _more(key: str, meaning: str, goal: float | None = None, floor: float | None = None) -> Goal:
    return Goal(key, meaning, goal, floor)


def _less(key: str, meaning: str, goal: float | None = None, floor: float | None = None) -> Goal:
    return Goal(key, meaning, goal, floor, less_is_better=True)


GOALS = (
    _more("save_vs_limit", "durable committed save: speed ÷ raw direct write", 0.97, 0.85),
    _more("save_vs_limit_huge_pages", "durable committed save: speed ÷ raw direct write from huge pages"),
    _more("save_vs_dcp", "durable save: speed ÷ PyTorch DCP (best of the round)", 1.5, 1.05),
    _more("save_p90_vs_dcp_p90", "durable save, 90th percentile of seconds: DCP ÷ ours", 3, 2),
    _more("save_vs_torch_checkpointing", "durable save: speed ÷ torch_checkpointing", 3.3, 2.5),
    _more("save_vs_torch_save", "durable save: speed ÷ torch.save with fsync"),
    _more("save_vs_safetensors", "durable save: speed ÷ safetensors with fsync"),
    _more("load_cold_vs_limit", "cold load, all digests checked: speed ÷ raw direct read", 0.97, 0.85),
    _more("load_cold_vs_limit_huge_pages", "cold load, all digests checked: speed ÷ raw direct read into huge pages"),
    _more("load_cold_vs_dcp", "cold load, all digests checked: speed ÷ DCP", 1.9, 1.5),
    _more("load_warm_vs_dcp", "load from the page cache, all digests checked: speed ÷ DCP", 3, 1.5),
    _less("stall_copy_vs_memcpy", "time that a `copy` save blocks training ÷ one memcpy of the same bytes", 1.1, 1.3),
    _more("stall_copy_vs_dcp_async", "time that DCP async blocks training, best stager ÷ a `copy` save", 8, 4),
    _more("stall_copy_vs_dcp_async_default", "time that DCP async blocks training, no stager passed ÷ a `copy` save"),
    _less(
        "stall_lazy_seconds_per_gib", "time that a `lazy` save blocks training, seconds per GiB and rank", 0.005, 0.02
    ),
    _less("train_slowdown", "time of 200 training steps with a `lazy` save every 10 ÷ without saves", 1.01, 1.05),
    _less("reshard_read_amplification", "bytes that all ranks read to reshard ÷ bytes of the state", 1.00, 1.05),
    _more("tiny_save_vs_dcp", "save of 20,000 tensors of 16 bytes: speed ÷ DCP", 30, 15),
    _more("tiny_load_vs_dcp", "load of 20,000 tensors of 16 bytes: speed ÷ DCP", 30, 15),
    _more("tiny_save_dtensor_vs_dcp", "save of 20,000 tensors of 16 bytes as DTensors on 2 ranks: speed ÷ DCP"),
    _more("tiny_load_dtensor_vs_dcp", "load of 20,000 tensors of 16 bytes as DTensors on 2 ranks: speed ÷ DCP"),
    _more("tiny_save_vs_torch_checkpointing", "save of 20,000 tensors of 16 bytes: speed ÷ torch_checkpointing", 2, 1),
    _less("tiny_save_growth", "time to save 5 times as many tensors ÷ 5 times the time (1 is linear)"),
    _less("tiny_load_growth", "time to load 5 times as many tensors ÷ 5 times the time (1 is linear)"),
    _less("save_peak_extra_mib", "peak memory of a save above state and arena, MiB per rank", 32, 128),
    _less("plan_seconds_16384", "first plan of one rank of 16,384, with the agreement, seconds", 0.2, 1.0),
    _less("commit_seconds_16384", "commit of 16,384 parts, seconds", 10, 20),
    _less("index_bytes_per_chunk", "bytes of index per chunk", 40, 64),
    _less("load_plan_seconds_16384", "load plan of one rank of 16,384, seconds", 0.5, 2),
    _less(
        "load_bytes_in_per_rank_16384", "bytes that other ranks send to one rank of 16,384 in a load", 4 << 20, 64 << 20
    ),
    _less(
        "save_bytes_into_rank0_16384",
        "bytes into rank 0 of 16,384 as a save opens and one value differs by rank",
        8 << 20,
        64 << 20,
    ),
    _less(
        "store_calls_dead_rank_16384",
        "requests of 16,384 ranks to the key-value store as a save opens and one rank is dead",
        50_000,
        200_000,
    ),
    _less("connections_per_rank", "most connections of a rank to the key-value store, torch's own included", 3, 4),
    _less(
        "announced_step_calls_on_training_thread", "calls to the key-value store on the training thread for steps", 0, 0
    ),
    _less("index_bytes_read_per_rank_16384", "share of the whole index that one rank reads", 0.01, 0.1),
    _less("commit_peak_mib_16384", "memory of the committing rank of 16,384, MiB", 1024, 1300),
    _less("cut_plan_seconds_16384", "packs cut for objects: first plan of one rank of 16,384, seconds", 0.2, 1.0),
    _less("cut_commit_seconds_16384", "packs cut for objects: commit of 16,384 parts, seconds", 10, 20),
    _less("cut_commit_peak_mib_16384", "packs cut for objects: memory of the committing rank, MiB", 1024, 1300),
    _less("cut_index_bytes_per_chunk_16384", "packs cut for objects: bytes of index per chunk", 40, 64),
    _less("cut_load_plan_seconds_16384", "packs cut for objects: load plan of one rank of 16,384, seconds", 0.5, 2),
    _less(
        "cut_load_bytes_in_per_rank_16384",
        "packs cut for objects: bytes that other ranks send to one rank of 16,384 in a load",
        4 << 20,
        64 << 20,
    ),
    _less(
        "cut_index_bytes_read_per_rank_16384",
        "packs cut for objects: share of the index that one rank reads",
        0.01,
        0.1,
    ),
    _more(
        "index_vs_ds_to_universal",
        "DeepSpeed ZeRO-1, 124 M parameters: ds_to_universal and load ÷ our load in place",
        20,
        6,
    ),
    _more(
        "index_vs_ds_to_universal_tiny", "DeepSpeed ZeRO-1, 2,000 parameters of 4,096 elements: the same ratio", 100, 30
    ),
    _more(
        "export_vs_zero_to_fp32",
        "DeepSpeed ZeRO-1, 124 M parameters, to safetensors: zero_to_fp32.py ÷ our export",
        3,
        1.2,
    ),
    _more("export_vs_dcp_consolidate", "DCP to one file: the faster of PyTorch's two ways ÷ our export", 3, 1.2),
    _less("export_peak_over_budget_mib", "peak memory of an export above its budget, MiB", 200, 200),
    _less("read_amplification", "bytes read to load a DeepSpeed checkpoint in place ÷ bytes loaded", 1.00, 1.05),
    _more("put_vs_limit", "object store, durable committed save: speed ÷ bare obstore.put"),
    _more("get_vs_limit", "object store, load, all digests checked: speed ÷ bare obstore.get_range"),
    _less("get_cpu_vs_limit", "object store, load: processor time ÷ bare obstore.get_range", 1.3, 2),
    _more(
        "stream_scaling",
        "object store, connections of 16 MiB/s and 50 ms: save of one rank ÷ one connection",
        7,
        5,
    ),
    _less("object_cpu_seconds_per_gib", "object store, save: processor time ÷ bare obstore.put", 1.8, 2.5),
    _more("vs_dcp_fsspec", "object store, save and load together: speed ÷ DCP with s3fs", 3, 1.3),
    _more("vs_dcp_fsspec_save", "object store, save: speed ÷ DCP with s3fs"),
    _more("vs_dcp_fsspec_load", "object store, load: speed ÷ DCP with s3fs"),
    _more(
        "vs_s3torchconnector_signed",
        "object store, save and load together: speed ÷ DCP with s3torchconnector, content signed by Holdfast alone",
    ),
    _more("vs_s3torchconnector_signed_save", "object store, save: speed ÷ DCP with s3torchconnector"),
    _more("vs_s3torchconnector_signed_load", "object store, load: speed ÷ DCP with s3torchconnector"),
    _less(
        "round_trips_before_return", "object store, second save: round trips of rank 0 before the call returns", 1, 2
    ),
    _less(
        "requests_per_save_rank0",
        "object store, save with four steps there: requests of rank 0, packs not counted",
        12,
        16,
    ),
    _less("requests_per_load", "object store, load with four steps there: requests, ranges not counted", 10, 14),
    _less(
        "stall_100ms_seconds",
        "object store, 100 ms before every reply: seconds of the call of a `lazy` save above those on a disk",
        0.1,
        0.25,
    ),
    _less("object_peak_extra_mib", "object store, peak memory of a save above state and arena, MiB per rank", 264, 320),
    _more("drain_vs_limit", "near tier, drain of two ranks to an object store: speed ÷ bare obstore.put", 0.9, 0.75),
    _less("drain_cpu_vs_save", "near tier, drain to an object store: processor time ÷ a save straight there", 0.8, 1.1),
    _less("drain_slowdown", "time of steps beside a drain of 256 MiB to a disk every 10 s ÷ without", 1.01, 1.05),
    _less("drain_slowdown_store", "the same, drain to an object store that runs on the same cores", 1.01, 1.05),
    _less(
        "shelf_save_vs_memcpy", "near tier in memory, save until it is there, hashed ÷ one copy of its bytes", 1.5, 1.9
    ),
    _less("shelf_cpu_vs_disk", "the same save, processor time ÷ a save to a disk", 0.75, 0.9),
    _less("shelf_stall_vs_memcpy", "time that a save into memory blocks training ÷ one copy of its bytes", 1.1, 1.3),
    _more("recover_vs_disk", "load from a near tier in memory: speed ÷ a cold load from a disk", 1.8, 1.4),
    _more("recover_cpu_vs_disk", "the same load, processor time of the disk's ÷ its own", 1.2, 1.05),
    _less(
        "memory_vs_state", "near tier in memory, `lazy` saves: peak of the tier and of the process ÷ state", 2.2, 2.4
    ),
    _less("agent_rss_anon_mib", "agent of a root in an object store: memory of its own, MiB", 40, 80),
    _less("agent_idle_cpu_percent", "the same agent beside a job: share of a core, %", 0.1, 1),
    _less(
        "near_train_slowdown",
        "time of training steps of 0.5 s with a save into memory every 2 and a drain every 20 ÷ without",
        1.03,
        1.06,
    ),
    _more(
        "protect_vs_limit",
        "near tier of peers, 4 nodes: time from `near` to `replicated` of plain sockets with one XOR ÷ ours",
        0.85,
        0.7,
    ),
    _more(
        "recover_node_vs_limit",
        "load of a lost node's share: time of plain sockets with one XOR, copy and hash ÷ ours",
        0.85,
        0.7,
    ),
    _less("wire_cpu_vs_sockets", "proven reads of 8 MiB, processor time of both ends ÷ plain sockets", 1.12, 1.25),
    _less("load_with_slow_peer", "load from peers, one of them sends a tenth as fast ÷ all alike", 3, 5),
    _less(
        "peers_memory_vs_state",
        "node of peers in groups of 4: peak of its folder and rank above the state ÷ share",
        2.8,
        3,
    ),
    _less(
        "peers_train_slowdown",
        "time of training steps of 0.5 s with a save into the memory of peers every 2 ÷ without",
        1.04,
        1.07,
    ),
    _less("all_reduce_slowdown", "time of gloo all-reduces of 64 MiB beside protection under a cap ÷ alone", 1.1, 1.2),
    _less("peers_all_seconds_1000", "1,000 nodes: list, looks and plans together, seconds", 1.5, 5),
    _less(
        "peers_plans_seconds_1000", "1,000 nodes: placement, judging of 8 steps and plan of a drain, seconds", 0.2, 1
    ),
    _less("run_page_vs_ls", "page over a run of 2,000 steps, first answer ÷ `list_steps`", 1.2, 2),
    _less("refresh_vs_listing", "a poll of this page without news ÷ listing the folders of the root", 2, 5),
    _less("heat_map_16384", "heat map of 16,384 ranks, drawn in Chromium ÷ reading and decoding the reports", 2, 4),
    _less("tensor_tree_200k", "tree of 200,000 tensors, first answer ÷ opening the checkpoint", 1.2, 2),
    _less("page_train_slowdown", "time of two computing processes while the page is polled each 5 s ÷ alone", 1, 1.02),
    _less("serve_rss_mib", "memory of the server after the heat map, MiB", 300, 600),
    _less("report_mib", "`--out` of 300 steps on 64 ranks, MiB", 2, 8),
    _more(
        "ratio_state",
        "compressed: bytes of a bf16 state, 14 a parameter ÷ bytes of the checkpoint",
        1.40,
        1.37,
    ),
    _more("ratio_state_plain_weights", "compressed, weights left plain: the same ratio", 1.32, 1.29),
    _more("ratio_ddp2", "compressed, two DDP replicas: the same ratio", 1.38, 1.35),
    _more("ratio_hsdp", "compressed, HSDP on 2 × 2 ranks: the same ratio", 1.38, 1.35),
    _more("ratio_fp32_fsdp2", "compressed, fp32 under FSDP2, 12 bytes a parameter: the same ratio", 1.22, 1.19),
    _more("ratio_vs_zipnn", "compressed: ratio of the state ÷ zipnn's on each tensor", 1.13, 1.11),
    _more("ratio_vs_dcp_zstd", "compressed: ratio of the state ÷ that of DCP with ZStandard", 1.26, 1.22),
    _more("encode_vs_zipnn", "encoding, digests included: bytes per processor second ÷ zipnn", 2, 1.4),
    _more("encode_vs_zstd3", "encoding, digests included: bytes per processor second ÷ zstd level 3", 2.2, 1.5),
    _more("decode_vs_zipnn", "decoding, all digests checked: bytes per processor second ÷ zipnn, unchecked", 0.6, 0.3),
    _more("save_on_vs_dcp_zstd", "durable save, compressed: speed ÷ DCP with ZStandard", 2, 1.4),
    _more("load_on_vs_dcp_zstd", "cold load of compressed, all digests checked: speed ÷ DCP with ZStandard", 1.5, 1.1),
    _more("auto_vs_raw_worst", "save, compression='auto': speed ÷ raw, to the store that suits it least", 1.0, 0.97),
    _more("auto_vs_raw_slow", "save, compression='auto', to a store of 0.1 GB/s: speed ÷ raw", 1.35, 1.25),
    _less(
        "coding_slowdown",
        "time of 200 training steps with an 'auto' save every 10 at 0.25 GB/s ÷ with raw saves",
        1.02,
        1.05,
    ),
    _less("weights_only_read", "compressed: bytes read for weights alone ÷ bytes they are stored in", 1.00, 1.05),
    _less(
        "masters_only_read",
        "compressed: bytes read for masters alone ÷ bytes they and their pairs are stored in",
        1.00,
        1.05,
    ),
    _less("coded_read_amplification", "compressed: bytes that all ranks read to reshard ÷ bytes stored", 1.00, 1.05),
    _less(
        "compression_peak_extra_mib", "peak memory of a compressed save above state and arena, MiB per rank", 32, 128
    ),
    _less("index_bytes_per_chunk_coded", "bytes of index per compressed chunk", 34, 44),
    _less(
        "redo_overhead",
        "redo log: processor time of a training step of 1.5 s, 32 MiB logged a rank ÷ without the log",
        1.015,
        1.03,
    ),
    _less("redo_overhead_coded", "the same with a log of compressed gradients", 1.04, 1.07),
    _less("boundary_ms_1000_parameters", "redo log, 1,000 small parameters: milliseconds added to `maybe_save`", 3, 6),
    _less("base_stall_with_log", "redo log: time that a `copy` save blocks training ÷ without the log", 1.05, 1.2),
    _less("rpo_steps_worst", "redo log, SIGKILL at random, steps of 1.5 s: most steps lost", 1, 2),
    _less("rpo_seconds_p95", "redo log, SIGKILL at random, steps of 50 ms: 95th percentile of seconds lost", 0.15, 0.3),
    _less("redo_vs_step", "redo of a record ÷ a bare AdamW step of the same parameters", 1.3, 2),
    _more("record_ratio_fp32", "redo log: bytes of an fp32 state, 12 a parameter ÷ bytes of a record", 2.95, 2.9),
    _more("record_ratio_fp32_coded", "the same with compressed gradients", 3.4, 3.2),
    _more("record_ratio_bf16_clipped_coded", "the same with compressed gradients, reduced in bf16", 8.5, 7.5),
    _less(
        "redo_peak_extra_mib",
        "peak memory of a load with redo above a bare step with its gradients, MiB per rank",
        32,
        128,
    ),
    _less(
        "redo_recover_bytes_in_per_rank_16384",
        "bytes that come to one rank of 16,384 to redo 24 records, beside gradients",
        4 << 20,
        64 << 20,
    ),
    _less("peak_error_worst", "activations: worst error of a predicted peak, relative, two models", 0.01, 0.02),
    _less("over_budget", "activations: plans whose measured peak is above the budget", 0, 0),
    _less("slowdown_error_p95", "activations: 95th percentile of predicted less measured slowdown", 0.03, 0.06),
    _less("slowdown_error_of_plain", "activations: slowdown of plain training against itself, median of rounds"),
    _less("overhead_e0_at_62", "exact gradients, 0.62 of the peak: overhead ÷ full checkpointing's", 0.05, 0.15),
    _less("overhead_e0_at_42", "exact gradients, 0.42 of the peak: overhead ÷ full checkpointing's", 0.40, 0.60),
    _less(
        "overhead_e0_at_full_peak",
        "exact gradients, the peak of full checkpointing: overhead ÷ full checkpointing's",
        0.95,
        1.05,
    ),
    _less(
        "slowdown_vs_sac",
        "exact gradients, the peak of selective checkpointing (matmuls, attention): step time ÷ its",
        1.00,
        1.03,
    ),
    _less("overhead_e02_at_42", "errors within 0.02, 0.42 of the peak: overhead ÷ full checkpointing's", 0.10, 0.30),
    _less("overhead_e25_at_38", "errors within 0.25, 0.38 of the peak: overhead ÷ full checkpointing's", 0.15, 0.35),
    _more("q8_ratio", "activations with outlier channels, fp32: bytes ÷ bytes of q8", 3.9, 3.5),
    _more("q4_ratio", "activations with outlier channels, fp32: bytes ÷ bytes of q4", 7.6, 6.5),
    _less("bound_worst", "hostile tensors: worst error of an element ÷ its bound", 1, 1),
    _less("gradient_error_per_bound", "error of all gradients, relative ÷ error bound", 0.6, 1.0),
    _less("fit_steps", "steps of the longest fit", 25, 40),
    _less("solve_seconds_256", "256 units of 32 columns: processor seconds of a solution", 1, 5),
    _less("hook_overhead", "hooks that keep every tensor: step time ÷ plain training", 1.01, 1.03),
    _less("loss_change_e02", "errors within 0.02, 600 steps: change of the loss ÷ range of three seeds", 0.1, 0.5),
    _less("loss_change_e25", "errors within 0.25, 600 steps: change of the loss ÷ range of three seeds", 1.0, 2.0),
    _less("slowdown_error_p95_modern", "slowdown_error_p95 of the second model", 0.03, 0.06),
    _less("slowdown_error_of_plain_modern", "slowdown_error_of_plain of the second model"),
    _less("overhead_e0_at_62_modern", "overhead_e0_at_62 of the second model: RMSNorm, SwiGLU, autocast"),
    _less("overhead_e0_at_42_modern", "overhead_e0_at_42 of the second model"),
    _less("overhead_e0_at_full_peak_modern", "overhead_e0_at_full_peak of the second model"),
    _less("slowdown_vs_sac_modern", "slowdown_vs_sac of the second model"),
    _less("fit_steps_modern", "fit_steps of the second model", 25, 40),
    _more("loader_vs_plain_1k", "`data.Loader`, samples of 1 KiB: samples a second ÷ plain `DataLoader`", 1.0, 0.9),
    _more("batches_vs_plain_1k", "`DataLoader` over `data.Batches`, samples of 1 KiB: the same ratio"),
    _more("loader_vs_plain_100k", "`data.Loader`, samples of 100 KiB: the same ratio", 1.0, 0.95),
    _more("batches_vs_plain_100k", "`DataLoader` over `data.Batches`, samples of 100 KiB: the same ratio"),
    _less(
        "first_batch_large_vs_small", "resume in the middle of 10⁹ samples: time to the first batch ÷ of 10³", 1.1, 2
    ),
    _less("order_peak_mib", "order of 10⁹ samples: peak memory of a resume and steps after it, MiB", 1, 16),
    _less(
        "state_bytes", "position in 10⁹ samples: bytes of the manifest, 64 a source of a mixture subtracted", 512, 1024
    ),
    _less("save_with_data_vs_without", "call of a save with a position, 3 workers at work ÷ without", 1.01, 1.05),
)
"""In the order in which they are shown."""

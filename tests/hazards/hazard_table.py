"""The hazards of putting kernels into models: failures elsewhere, what tigon does, and the tests that show it.

`python tests/hazards/hazard_page.py` writes docs/hazards.md from these rows. `test_hazard_page.py` fails if the page
differs from the rows, or if a row names a test that does not exist.
"""

from __future__ import annotations

from dataclasses import dataclass

# The evidence for a claim about another project.
MEASURED = "measured"
READ = "read in the source"
REPORTED = "reported"

LIGER = "https://github.com/linkedin/Liger-Kernel"
TRL = "https://github.com/huggingface/trl"
TRANSFORMERS = "https://github.com/huggingface/transformers"


@dataclass(frozen=True, kw_only=True)
class Hazard:
    """One way to get wrong results without an error."""

    name: str
    elsewhere: str
    """What happens in Liger Kernel 0.8.5 with transformers 5.17, unless the text names another project."""
    known: str
    """MEASURED, READ or REPORTED."""
    links: tuple[str, ...] = ()
    here: str
    """What tigon does instead."""
    tests: tuple[str, ...]
    """Each as file::function, relative to tests/."""
    cases: tuple[str, ...] = ()
    """The cases P01 to P11, from the end of the page, that this hazard belongs to."""


_OPS, _MODELS, _HAZARDS = "ops/test_autograd_contract.py", "models/test_patch.py", "hazards/test_patched_models.py"
_SEAM = "models/test_loss_seam.py"
_HEADS, _PARITY, _FAMILIES = "models/test_heads.py", "models/test_parity.py", "models/test_families.py"
_SHARDED = "models/test_sharded.py"
_PREFERENCE, _POLICY = "compat/test_liger_preference.py", "compat/test_liger_policy.py"
_PEAKED = "ops/test_peaked_logits.py"
_DIVERGENCES = "compat/test_liger_divergences.py"

SECTIONS: dict[str, tuple[Hazard, ...]] = {
    "The head": (
        Hazard(
            name="A frozen trunk leaves the head without a gradient",
            elsewhere="The trunk is frozen and the head is trainable. `lm_head.weight.grad` is None and the loss "
            "looks normal, because the weight gradient is computed only if the hidden states require one. Linear "
            "probing, training new tokens and the first stage of Medusa then train nothing.",
            known=MEASURED,
            here="Each gradient is computed if its own `needs_input_grad` is set. A frozen half costs no matrix "
            "product.",
            tests=(
                f"{_HAZARDS}::test_trainable_head_on_a_frozen_trunk_gets_its_gradient",
                f"{_OPS}::test_gradient_is_the_same_whichever_other_inputs_require_one",
                "ops/test_linear_cross_entropy.py::test_frozen_half_or_eval_costs_no_product",
            ),
            cases=("P04",),
        ),
        Hazard(
            name="An adapter on the head trains as if it were not there",
            elsewhere="With `target_modules=[..., 'lm_head']` the fused loss reads `lm_head.weight` and skips the "
            "adapter, whose gradients stay None. The loss is that of the base weight: 5.21 instead of 5.90. TRL now "
            "raises an error.",
            known=MEASURED,
            links=(f"{TRL}/issues/4612", f"{TRL}/pull/5977"),
            here="`lm_head`'s own forward computes the loss. The loss is used only if `loss_function` receives "
            "exactly the head's object. The sum with an adapter's output is another object. The loss is then computed "
            "from the full logits, with one warning. 31 tuners of PEFT are compared.",
            tests=(
                f"{_HAZARDS}::test_adapter_on_the_head_counts_in_the_loss_or_is_refused",
                f"{_HEADS}::test_adapter_on_the_head_is_trained_and_without_logits_if_it_is_lora",
                f"{_HEADS}::test_modules_to_save_on_the_head_trains_its_copy_with_the_fused_loss",
                "integration/test_with_trl.py::test_sft_trainer_still_refuses_an_adapter_on_the_head",
            ),
            cases=("P02",),
        ),
        Hazard(
            name="`modules_to_save` under another adapter name",
            elsewhere="`modules_to_save=['lm_head']` works for the adapter named default. An adapter named foo raises "
            "an AttributeError.",
            known=MEASURED,
            here="tigon finds the active copy by the structure of the wrapper, for any adapter name.",
            tests=(f"{_HEADS}::test_modules_to_save_on_the_head_trains_its_copy_with_the_fused_loss",),
            cases=("P02",),
        ),
        Hazard(
            name="The head's bias is dropped",
            elsewhere="The patched forward reads only the weight. A Llama with a biased head has a loss of 5.15 "
            "instead of 9.64, and the bias gets no gradient.",
            known=MEASURED,
            here="The op takes the bias and computes its gradient.",
            tests=(
                f"{_HAZARDS}::test_bias_of_the_head_counts_in_the_loss_and_gets_a_gradient",
                f"{_PARITY}::test_head_with_a_bias_trains_the_bias",
            ),
            cases=("P03",),
        ),
        Hazard(
            name="Hooks on the head do not run",
            elsewhere="The module is never called, so its forward hooks never run.",
            known=MEASURED,
            here="The head is called. Pre-hooks take effect. Forward hooks receive an object of the logits' shape, "
            "and a hook that edits it changes the loss. A hook with a custom autograd function is refused, because it "
            "would get the gradient of a scalar.",
            tests=(
                f"{_HAZARDS}::test_hooks_on_the_head_are_called_and_take_effect",
                f"{_HAZARDS}::test_hook_that_edits_the_logits_reaches_the_loss",
                f"{_HEADS}::test_hook_with_its_own_autograd_function_is_refused",
            ),
            cases=("P03",),
        ),
        Hazard(
            name="A quantised or parametrised head is multiplied by its raw weight",
            elsewhere="The loss multiplies by `lm_head.weight` and ignores the head's forward.",
            known=READ,
            here="Only an `nn.Linear` with `nn.Linear`'s forward is fused. Other heads keep their forward, and the "
            "report names their class.",
            tests=(
                f"{_HEADS}::test_quantised_head_is_left_to_its_own_forward",
                f"{_HEADS}::test_parametrized_head_trains_its_parametrization",
            ),
            cases=("P03",),
        ),
        Hazard(
            name="A shard of the weight is taken for the weight",
            elsewhere="Reading `lm_head.weight` outside its module's forward bypasses the hooks that gather it. The "
            "results are size errors or worse under ZeRO-3, FSDP2 and tensor parallelism. Only FSDP1 has a special "
            "case.",
            known=REPORTED,
            links=(
                f"{TRL}/issues/5891",
                f"{TRL}/issues/6372",
                "https://github.com/EvolvingLMMs-Lab/lmms-engine/issues/29",
                f"{LIGER}/pull/674",
            ),
            here="Inside the head's forward the weight is whole. If nothing gathered it, an error or a warning names "
            "`lm_head.weight`. The loss of a tensor-parallel head of DTensors reads each rank's rows as what they are. "
            "Gradients on two ranks are compared with those on one.",
            tests=(
                "hazards/test_two_ranks.py::test_gradients_of_two_ranks_are_those_of_one",
                f"{_SHARDED}::test_fsdp2_trains_with_the_fused_loss",
                f"{_SHARDED}::test_fsdp1_trains_with_the_fused_loss",
                f"{_SHARDED}::test_head_partitioned_outside_its_own_forward_trains_as_whole",
                f"{_SHARDED}::test_head_that_nobody_gathered_is_refused_by_name",
                f"{_SHARDED}::test_tensor_parallel_head_of_dtensors_trains_with_the_fused_loss",
                "models/test_tensor_parallel.py::"
                "test_model_with_a_divided_head_has_loss_gradients_and_logits_of_the_whole_one",
                "ops/test_linear_cross_entropy.py::test_sharded_or_mismatched_weight_is_refused",
            ),
            cases=("P05",),
        ),
        Hazard(
            name="RMSNorm gathers a sequence-parallel tensor",
            elsewhere="The norm calls `full_tensor()` on a DTensor, and the sharding over the sequence is lost. The "
            "other ops do not handle DTensors.",
            known=READ,
            here="The ops are named operators without a sharding rule, so PyTorch refuses a DTensor and names the "
            "operator. Under FSDP2 the ops receive plain tensors.",
            tests=(
                "hazards/test_patched_models.py::test_dtensor_is_refused_by_every_op",
                "hazards/test_two_ranks.py::test_gradients_of_two_ranks_are_those_of_one",
            ),
            cases=("P05",),
        ),
        Hazard(
            name="A loss function of the user's own is ignored",
            elsewhere="`model.loss_function = mine` has no effect on a patched model.",
            known=MEASURED,
            here="The patched model calls it every time. Only transformers' own next-token loss is fused.",
            tests=(
                f"{_HAZARDS}::test_custom_loss_function_is_respected",
                f"{_MODELS}::test_custom_loss_function_is_respected_and_reported",
            ),
            cases=("P03",),
        ),
        Hazard(
            name="Logits are None in training, and all there in evaluation",
            elsewhere="`outputs.logits` of a training step is None, and metrics or distillation fail later. In "
            "evaluation the full logits are computed even if only the loss is needed.",
            known=READ,
            links=(f"{TRL}/issues/5069", f"{TRANSFORMERS}/issues/44981"),
            here="In training `outputs.logits` is a tensor that is computed when it is read, with one warning. "
            "Evaluation computes the logits, because metrics read them; `skip_logits=True` avoids this.",
            tests=(
                f"{_HAZARDS}::test_logits_of_a_training_step_can_be_read",
                f"{_HAZARDS}::test_evaluation_with_skip_logits_computes_the_loss_alone",
                "models/test_deferred.py::test_no_tensor_of_tokens_by_vocabulary_exists_in_a_training_step",
                "models/test_with_trainer.py::test_evaluation_metrics_receive_real_logits",
                "integration/test_with_trl.py::test_metrics_from_training_logits_allocate_the_logits_once",
            ),
            cases=("P06",),
        ),
    ),
    "Labels": (
        Hazard(
            name="A label out of range gives garbage",
            elsewhere="The fused loss does not check labels. A label equal to the vocabulary size gives a loss of "
            "7.5e30, or a plausible one. On a GPU it reads memory beyond the logits. The plain cross entropy asserts, "
            "with two synchronisations, unless Python runs with -O.",
            known=MEASURED,
            links=(f"{LIGER}/issues/916",),
            here="Labels are compared in 64 bits before any address is computed. On the CPU a label out of range "
            "raises a LabelError. On a GPU the loss and gradients of that row are NaN and the other rows are "
            "unchanged, without a synchronisation.",
            tests=(
                f"{_HAZARDS}::test_label_out_of_range_is_refused_with_its_value_and_position",
                "ops/test_cross_entropy.py::test_label_out_of_range_raises_or_gives_nan_in_its_row_alone",
            ),
            cases=("P07",),
        ),
        Hazard(
            name="Ignored labels and torch.compile",
            elsewhere="Under torch.compile the fused loss is wrong as soon as one label is ignored: 61.73 instead of "
            "21.40.",
            known=REPORTED,
            links=(f"{LIGER}/pull/1338",),
            here="Every op is registered with torch.library and writes every row. One compiled graph is called with "
            "none, some, nearly all and all labels ignored, and compared with eager mode.",
            tests=(
                "integration/test_compiled_families.py::test_compiled_loss_equals_eager_with_and_without_ignored_labels",
                "models/test_compile.py::test_compiled_training_equals_eager_with_and_without_ignored_labels",
                "ops/test_registration.py::test_compiled_op_is_one_graph_for_all_token_counts_and_equals_eager",
            ),
        ),
        Hazard(
            name="Evaluation zeroes the logits of ignored rows",
            elsewhere="Under `no_grad`, the fused loss sets the rows of ignored labels to zero in the caller's own "
            "logits. Metrics and generation read them afterwards.",
            known=MEASURED,
            here="No op writes to an input unless `inplace=True` was passed, and never under `no_grad`.",
            tests=(
                f"{_HAZARDS}::test_evaluation_gives_the_unpatched_logits_and_loss",
                f"{_OPS}::test_inputs_outputs_and_upstream_gradient_are_not_modified",
                "ops/test_cross_entropy.py::test_inplace_without_gradients_leaves_the_logits_unchanged",
            ),
        ),
        Hazard(
            name="A checkpoint without some of its tensors trains from random numbers",
            elsewhere="transformers 5.23 initialises a missing tensor with random numbers and logs a table of such "
            "tensors as a warning. A script that lowers the verbosity does not see it.",
            known=MEASURED,
            here="tigon compares the headers of the files with the model. It refuses a missing tensor by name before "
            "it creates the run folder.",
            tests=(
                "trainer/test_model.py::test_missing_tensor_is_named_before_the_run_folder_exists",
                "models/test_weight_files.py::test_missing_and_renamed_tensors_are_named",
            ),
        ),
        Hazard(
            name="Labels that are edited in the forward",
            elsewhere="Liger Kernel's forwards use the labels that they are called with. The mistake is easy to make "
            "if labels are counted before the trunk runs: `labels[:, :5] = -100` in a subclass's forward or in a hook "
            "then changes nothing.",
            known=READ,
            here="The versions of labels, `shift_labels` and `num_items_in_batch` are compared at the head and at the "
            "loss. Labels that changed before the head are read again. If they change after the head, the loss is "
            "computed from the full logits. A compiled step returns NaN instead, because its graph cannot choose. A "
            "write through `.data` or into a numpy view does not change the version. It counts on the CPU, where "
            "values are compared, and in a compiled step. On a GPU in eager mode a write to `labels.data` inside the "
            "forward is not noticed, because a comparison would wait for the device. Write to the labels themselves.",
            tests=(
                f"{_SEAM}::test_labels_edited_before_super_forward_count_in_the_loss",
                f"{_SEAM}::test_labels_edited_by_a_hook_count_in_the_loss",
                f"{_SEAM}::test_items_edited_after_the_head_divide_the_loss",
                f"{_SEAM}::test_compiled_step_whose_labels_change_after_the_head_returns_nan",
            ),
        ),
        Hazard(
            name="Logits that are edited between head and loss",
            elsewhere="A fused loss has no logits to edit. These have no effect on the loss: `with torch.no_grad(): "
            "logits[..., 90:] = -1e4`, `logits.detach().mul_(2)`, a hook on the head.",
            known=READ,
            here="A read of the logits, or a write to them, creates an ordinary tensor, and the loss of that step is "
            "computed from it. All aliases share its memory: `detach`, `.data`, views, numpy arrays, `out=`. The step "
            "then costs the memory of the logits and of a copy, as the warning says.",
            tests=(
                f"{_SEAM}::test_logits_edited_between_head_and_loss_count_in_the_loss",
                f"{_SEAM}::test_logits_edited_by_a_hook_of_the_head_count_in_the_loss",
                f"{_SEAM}::test_copy_of_the_logits_keeps_what_they_were_before_an_edit",
                f"{_SEAM}::test_any_order_of_edits_and_losses_trains_as_unpatched",
                f"{_SEAM}::test_compiled_step_counts_edits_of_logits",
            ),
        ),
        Hazard(
            name="A loss that is computed twice",
            elsewhere="A forward may call `loss_function(logits, labels)` again, for a ratio or an auxiliary loss. A "
            "precomputed loss has only one gradient to return.",
            known=READ,
            here="The second loss of the same logits and labels is a copy of the first. Other labels or options get "
            "the ordinary loss of the full logits.",
            tests=(
                f"{_SEAM}::test_loss_asked_for_again_has_the_unpatched_models_gradients",
                f"{_SEAM}::test_repeated_loss_of_one_pair_computes_no_logits",
            ),
        ),
        Hazard(
            name="A batch without any label poisons the run",
            elsewhere="Division by zero labels gives NaN in PyTorch and in transformers' loss, and NaN gradients in "
            "the chunked `linear_cross_entropy` of PyTorch 2.13. Liger Kernel gives 0.",
            known=MEASURED,
            here="The loss is 0 and every gradient is exactly 0. This also holds for `num_items_in_batch=0` and for "
            "class weights that are all 0.",
            tests=(
                f"{_HAZARDS}::test_batch_with_all_labels_ignored_gives_zero_loss_and_gradients",
                "ops/test_cross_entropy.py::test_all_labels_ignored_gives_zero_loss_and_gradient",
                "ops/test_cross_entropy.py::test_zero_items_give_zero_loss_and_gradient",
                "ops/test_unfit_arguments.py::test_class_weights_that_are_all_zero_give_a_mean_of_zero",
            ),
            cases=("P07",),
        ),
        Hazard(
            name="Labels are shifted twice, or `shift_labels` is dropped",
            elsewhere="Heads with keyword arguments forget one of them. More than 20 heads of transformers dropped "
            "`shift_labels`, so each sequence-parallel shard lost its last target.",
            known=REPORTED,
            links=(f"{TRANSFORMERS}/issues/48493", f"{LIGER}/issues/708", f"{LIGER}/issues/888"),
            here="tigon copies no forward: the model's own forward passes its arguments to the loss. The patched "
            "model is compared with labels, shift_labels, both, num_items_in_batch, logits_to_keep and ignore_index.",
            tests=(
                f"{_PARITY}::test_each_keyword_keeps_its_meaning",
                f"{_PARITY}::test_gradient_accumulation_with_num_items_equals_one_large_batch",
                f"{_PARITY}::test_labels_that_do_not_fit_logits_to_keep_are_refused",
                f"{_FAMILIES}::test_patched_family_equals_unpatched_in_fp32",
            ),
            cases=("P07",),
        ),
    ),
    "Gradients": (
        Hazard(
            name="The second backward is another one",
            elsewhere="Gradients are computed in the forward and scaled in place in the backward, or written over "
            "saved tensors. With `retain_graph=True` a second backward of SwiGLU, cross entropy or the fused loss "
            "returns other gradients, without an error.",
            known=MEASURED,
            here="The second backward equals the first. `create_graph=True` raises a DoubleBackwardError.",
            tests=(
                f"{_HAZARDS}::test_second_backward_gives_the_unpatched_gradients",
                f"{_OPS}::test_second_backward_equals_the_first",
                f"{_OPS}::test_second_derivative_is_refused",
            ),
        ),
        Hazard(
            name="A residual connection around the norm",
            elsewhere="RMSNorm's backward writes its gradient over the upstream gradient, which autograd shares "
            "between the branches of an addition. The gradient of z in `z + norm(x)` is wrong by 0.3. In `norm(x) + "
            "z` it is correct.",
            known=MEASURED,
            links=(f"{LIGER}/issues/370",),
            here="Gradients are written to new memory.",
            tests=(
                f"{_OPS}::test_residual_connection_gets_the_sum_of_both_gradients",
                f"{_OPS}::test_inputs_outputs_and_upstream_gradient_are_not_modified",
            ),
        ),
        Hazard(
            name="Another use of a gate, a query or the logits",
            elsewhere="SwiGLU's backward overwrites the gate that it saved, RoPE rotates queries in place, and cross "
            "entropy turns logits into gradients. Autograd does not know. A regulariser, an auxiliary loss or a "
            "logging hook on the same tensor gets gradients that are wrong by up to 8.",
            known=MEASURED,
            links=(f"{LIGER}/issues/272",),
            here="Nothing is overwritten. A penalty on the inputs and outputs of every projection and norm of a model "
            "has the gradients of the unpatched model.",
            tests=(
                f"{_HAZARDS}::test_penalty_on_inner_tensors_gets_the_unpatched_gradient",
                f"{_OPS}::test_input_with_a_second_consumer_gets_the_sum_of_both_gradients",
                "models/test_deferred.py::test_read_logits_carry_gradients",
            ),
        ),
        Hazard(
            name="Parameters become gradients",
            elsewhere="If the gate, up or logits are leaves, they contain the gradients after the backward, and their "
            "version counters are still 0.",
            known=MEASURED,
            here="Weights, buffers, inputs and labels have the same bits and the same version after a training step. "
            "With `inplace=True` the version counter increases, and autograd raises an error for later uses.",
            tests=(
                f"{_HAZARDS}::test_training_step_leaves_weights_inputs_and_labels_unmodified",
                f"{_OPS}::test_inputs_outputs_and_upstream_gradient_are_not_modified",
                "ops/test_cross_entropy.py::test_autograd_detects_logits_overwritten_by_inplace",
            ),
        ),
    ),
    "Post-training losses": (
        Hazard(
            name="The reference model is ignored",
            elsewhere="`LigerFusedLinearKTOLoss` has `use_ref_model=False` by default. Hidden states and head of a "
            "reference that are passed are then ignored: the loss is 0.596 with and without them, instead of 0.247. A "
            "trainer without a separate reference model, as with PEFT adapters, passes False.",
            known=MEASURED,
            links=(f"{TRL}/issues/7063",),
            here="A reference that is passed counts, with a warning that names `use_ref_model`. `use_ref_model=True` "
            "without a reference raises an error.",
            tests=(f"{_PREFERENCE}::test_a_reference_that_is_passed_counts_with_a_warning_even_without_use_ref_model",),
        ),
        Hazard(
            name="Label smoothing is dropped",
            elsewhere="`LigerFusedLinearDPOLoss(label_smoothing=0.2)` accepts the option, and its sigmoid loss is the "
            "one without it.",
            known=MEASURED,
            links=(f"{TRL}/issues/7063",),
            here="It changes the sigmoid loss. A loss type that does not use it refuses it.",
            tests=(
                f"{_PREFERENCE}::test_label_smoothing_changes_the_sigmoid_loss_and_is_refused_where_it_has_no_meaning",
            ),
        ),
        Hazard(
            name="A KL per sequence is applied to every sequence",
            elsewhere="`kl` of the KTO loss is documented as (batch,), and is not divided into chunks. With a chunk "
            "per sequence, each is compared with all: the loss of 5 sequences is 2.99 instead of 0.598.",
            known=MEASURED,
            here="One number, or one per sequence; any other shape is refused.",
            tests=(
                f"{_PREFERENCE}::test_kto_is_the_formula_with_one_kl_or_one_per_sequence",
                f"{_PREFERENCE}::test_wrong_input_is_refused_by_name",
            ),
        ),
        Hazard(
            name="KTO's class weights do not exist",
            elsewhere="`LigerFusedLinearKTOLoss` has no weights for desirable and undesirable sequences, so a "
            "trainer's weights are dropped.",
            known=READ,
            links=(f"{TRL}/issues/7063",),
            here="Liger's class has Liger's arguments. `tigon.losses.kto` has both weights.",
            tests=("losses/test_unpaired.py::test_kto_and_its_gradients_are_the_formula",),
        ),
        Hazard(
            name="The head's gradient drifts with the number of chunks",
            elsewhere="The gradient is summed in the weight's dtype, chunk by chunk, and a chunk is one sequence. The "
            "error of a bf16 head's gradient grows with the batch: 0.6 % for 16 sequences, 1.3 % for 256.",
            known=MEASURED,
            links=(f"{LIGER}/issues/439",),
            here="Sums are fp32, and `chunk_size` has no effect: 0.4 % for both.",
            tests=(
                f"{_PREFERENCE}::test_gradient_of_a_bf16_head_does_not_depend_on_the_number_of_sequences_per_chunk",
            ),
        ),
        Hazard(
            name="A divergence of bf16 logits is computed in bf16",
            elsewhere="`LigerFusedLinearJSDLoss` takes the log-softmax of bf16 logits in bf16. For a student near its "
            "teacher the loss is 65 % too small.",
            known=MEASURED,
            here="Everything after the product is fp32: 0.3 % in the same case.",
            tests=(f"{_DIVERGENCES}::test_bf16_jsd_of_heads_is_as_accurate_as_its_logits",),
        ),
        Hazard(
            name="The gradient of a divergence is the rounding of its logits",
            elsewhere="Logits of bf16 hidden states are bf16. For logits with a standard deviation of 30, the "
            "student's gradient is 2 to 11 % off if the teacher is another model, and 30 % if the teacher is near the "
            "student (256 tokens, 32,000 columns, on a CPU).",
            known=MEASURED,
            here="The logits are fp32, and the gradient is 0.3 % off in the same cases. Log-probabilities, entropy and "
            "cross entropy have the same logits.",
            tests=(
                f"{_PEAKED}::test_gradients_of_a_student_near_its_teacher_are_below_0_7_percent_off",
                f"{_PEAKED}::test_gradients_of_log_probabilities_are_below_0_7_percent_off",
            ),
        ),
        Hazard(
            name="A padded teacher changes the student's probabilities",
            elsewhere="If the teacher's head has more rows than the student's, the student gets the logit 0 there. The "
            "loss then depends on a constant that is added to all logits: 0.493, or 0.454 with 5 subtracted.",
            known=MEASURED,
            here="The rows that only the teacher has are left out.",
            tests=(f"{_DIVERGENCES}::test_rows_that_only_a_padded_teacher_has_are_left_out",),
        ),
        Hazard(
            name="Padding counts in LUSPO",
            elsewhere="The loss is a mean over all positions. A change of the reference at masked tokens moves it from "
            "0.089 to 0.262, and `triton_grpo_loss` computes another value.",
            known=MEASURED,
            here="Masked tokens never enter a loss, as in TRL 1.16. Both functions compute the same one.",
            tests=(f"{_POLICY}::test_luspo_does_not_count_padding",),
        ),
        Hazard(
            name="A sequence or a batch without labels is NaN",
            elsewhere="A mean over the labels of an empty sequence is 0 / 0, which makes the batch's loss NaN. JSD and "
            "TVD divide by the number of labels of the batch.",
            known=MEASURED,
            here="Empty sequences and batches count as 0, with a gradient of 0.",
            tests=(
                f"{_PREFERENCE}::test_sequences_without_labels_give_finite_losses_and_gradients",
                f"{_DIVERGENCES}::test_batch_without_labels_gives_0_and_ignored_rows_may_be_nan",
            ),
        ),
        Hazard(
            name="A positional argument lands in another parameter",
            elsewhere="`liger_fused_linear_grpo` has 31 positional parameters, whose order changed. A call in the old "
            "order gives `True` as the temperature and a loss without an error. One of the project's tests does so.",
            known=MEASURED,
            here="The order is Liger's, and a value of the wrong type is refused by the name of its parameter.",
            tests=(f"{_POLICY}::test_options_without_a_meaning_are_refused_by_name",),
        ),
        Hazard(
            name="Logits become gradients in the GRPO loss",
            elsewhere="`triton_grpo_loss` writes the gradient over the logits by default, which other uses of them and "
            "a second backward then read.",
            known=READ,
            here="The logits are not written to.",
            tests=(f"{_POLICY}::test_logits_are_not_written_to_and_the_last_position_gets_a_gradient_of_0",),
        ),
    ),
    "Scope": (
        Hazard(
            name="Patching one model patches the others",
            elsewhere="`apply_liger_kernel_to_llama(model=a)` also replaces the classes and functions of the modeling "
            "module. All other Llamas of the process, built before or later, change with it. Only reloading modules "
            "reverts this.",
            known=MEASURED,
            here="A patched module gets a new class. All names in torch.nn, torch.nn.functional, the modeling module "
            "and its classes are the same objects afterwards. Models built before and after give the same bits, and "
            "`report.undo()` restores the model's own bits.",
            tests=(
                f"{_HAZARDS}::test_patch_leaves_other_models_and_the_process_unchanged",
                f"{_FAMILIES}::test_patching_one_model_leaves_others_of_its_family_unchanged",
                f"{_MODELS}::test_nothing_outside_the_instance_changes",
                f"{_MODELS}::test_undo_restores_the_unpatched_model_bit_for_bit",
                f"{_MODELS}::test_patching_twice_changes_nothing_and_adds_a_note",
            ),
            cases=("P08",),
        ),
        Hazard(
            name="`torch.nn.functional.cross_entropy` is replaced for the process",
            elsewhere="`cross_entropy=True` replaces it. Code that has nothing to do with the model then gets errors "
            "for probability targets and (N, C, L) logits, and zeroed logits in ignored rows.",
            known=MEASURED,
            here="`tigon.patch(cross_entropy=True)` changes only the loss of that model.",
            tests=(
                f"{_HAZARDS}::test_cross_entropy_and_layer_norm_of_torch_keep_their_features",
                f"{_HAZARDS}::test_patch_leaves_other_models_and_the_process_unchanged",
            ),
            cases=("P08",),
        ),
        Hazard(
            name="`torch.nn.LayerNorm` is another class",
            elsewhere="Without `model=`, the functions for mllama, gemma3, paligemma, internvl and smolvlm replace it "
            "by LigerLayerNorm. `elementwise_affine=False` then raises a TypeError. `isinstance(x, nn.LayerNorm)` is "
            "False for existing modules, so their weights get weight decay.",
            known=MEASURED,
            here="A patched LayerNorm is an instance of `nn.LayerNorm`, and `nn.LayerNorm` stays PyTorch's class.",
            tests=(
                f"{_HAZARDS}::test_cross_entropy_and_layer_norm_of_torch_keep_their_features",
                f"{_HAZARDS}::test_patched_layer_norm_is_an_instance_of_torch_layer_norm",
            ),
            cases=("P08",),
        ),
        Hazard(
            name="Patching after the model was built does half of it",
            elsewhere="If the functions are called without `model=` after the model was built, they replace forward "
            "and RoPE, but not norms and MLPs.",
            known=MEASURED,
            links=(f"{LIGER}/issues/170", f"{LIGER}/issues/199"),
            here="`patch` takes an existing model, replaces everything or nothing, and the report counts the modules. "
            "Parameters stay the same objects, so an existing optimizer continues to work.",
            tests=(
                f"{_MODELS}::test_report_counts_every_replaced_module_and_prints_them",
                f"{_MODELS}::test_failure_half_way_through_takes_everything_back",
                f"{_HAZARDS}::test_optimizer_made_before_the_patch_trains_the_patched_model",
            ),
            cases=("P08",),
        ),
    ),
    "What no longer matches": (
        Hazard(
            name="Dead patches",
            elsewhere="With transformers 5.17, 13 of the 172 names that are assigned to do not exist any more. The "
            "assignment succeeds and does nothing. RoPE of qwen2_vl and the experts of glm4v_moe are not replaced, "
            "`cross_entropy=True` does nothing for six families, and the project's own tests pass.",
            known=MEASURED,
            links=(f"{LIGER}/issues/920",),
            here="If a row claims a seam, or a flag is on, and nothing matches, `patch` raises a PatchError and "
            "changes nothing. Each row is tested on its family.",
            tests=(
                f"{_HAZARDS}::test_renamed_eps_attribute_is_refused_and_changes_nothing",
                f"{_FAMILIES}::test_row_replaces_what_its_flags_claim_and_refuses_other_flags",
                f"{_MODELS}::test_a_flag_that_matches_nothing_is_an_error_and_changes_nothing",
            ),
            cases=("P10",),
        ),
        Hazard(
            name="An unknown family is a line in a log",
            elsewhere="For an unknown model type, `_apply_liger_kernel` writes to the log at level INFO and returns.",
            known=READ,
            here="A family without a row is matched by structure, one module at a time. Each module is compared with "
            "the op on a small input, forward and gradient. If nothing matches, `patch` raises an error.",
            tests=(
                f"{_FAMILIES}::test_family_without_a_row_is_patched_by_structure_and_verified",
                f"{_FAMILIES}::test_model_in_which_nothing_matches_is_refused",
                f"{_FAMILIES}::test_module_that_structure_does_not_match_is_reported",
                "doctor/test_doctor_command.py::test_model_without_a_patched_module_is_a_problem",
            ),
            cases=("P09",),
        ),
        Hazard(
            name="A subclass, or remote code, with another formula under the same name",
            elsewhere="Classes are replaced by name, regardless of what their forward computes.",
            known=READ,
            here="The module's own forward and the op are compared before the module is replaced. A class with "
            "another formula stays and is reported.",
            tests=(
                f"{_HAZARDS}::test_model_with_custom_code_trains_as_unpatched",
                f"{_FAMILIES}::test_remote_code_with_a_capped_head_trains_right_and_is_fused_after_one_step",
                f"{_MODELS}::test_norm_with_another_formula_is_left_alone_and_reported",
                f"{_MODELS}::test_subclass_that_calls_super_is_patched_and_one_that_does_not_is_reported",
            ),
            cases=("P09",),
        ),
        Hazard(
            name="eps = 0 becomes 1e-6",
            elsewhere="The instance patch uses the first nonzero value of several attributes, or a default. A norm "
            "with eps 0, or with its eps under a new name, gets another eps.",
            known=MEASURED,
            here="The row names the attribute, and its value is read at every call. A norm without the attribute is "
            "left alone. If no norm has it, `patch` raises an error.",
            tests=(
                f"{_HAZARDS}::test_eps_of_the_norm_is_kept",
                f"{_MODELS}::test_eps_zero_and_an_edited_eps_are_used_as_they_are",
                f"{_MODELS}::test_norm_without_its_eps_attribute_is_left_alone_and_reported",
            ),
            cases=("P10",),
        ),
        Hazard(
            name="A release of transformers breaks the import",
            elsewhere="Names move in modeling files. The patcher then fails when it is imported, or does nothing.",
            known=REPORTED,
            links=(f"{LIGER}/issues/526", f"{LIGER}/issues/978", f"{LIGER}/issues/1242"),
            here="Importing tigon imports neither transformers nor a modeling file, and patching one family imports "
            "no other. `tigon doctor` knows the tested range. The tests of models, trainers, hazards and convergence "
            "pass with transformers 5.17.0 and 5.24.0. With 5.8.0, granitemoe is refused with a PatchError, and "
            "gpt_neox and gemma3 train with full logits.",
            tests=(
                "test_architecture.py::test_importing_tigon_imports_neither_transformers_nor_triton",
                "hazards/test_imports.py::test_patching_one_family_imports_no_code_of_another",
                "doctor/test_known_bad.py::test_transformers_outside_the_tested_range_is_reported",
            ),
            cases=("P11",),
        ),
        Hazard(
            name="A family is patched and not the same model",
            elsewhere="Per family: equal loss, gradients, generation, packed sequences and checkpointing. Liger "
            "Kernel passes this.",
            known=MEASURED,
            here="`verify(row)` proves it for every row, in fp32 and in bf16. Training for 32 steps ends at the same "
            "weights.",
            tests=(
                f"{_FAMILIES}::test_patched_family_equals_unpatched_in_fp32",
                f"{_FAMILIES}::test_patched_family_is_as_accurate_as_unpatched_in_bf16",
                f"{_FAMILIES}::test_kernels_equal_the_unpatched_family_on_a_gpu",
                "convergence/test_convergence.py::test_patched_training_ends_where_unpatched_training_ends",
            ),
            cases=("P01",),
        ),
    ),
    "Compilers and devices": (
        Hazard(
            name="torch.compile stops at every layer",
            elsewhere="RoPE, LayerNorm and cross entropy call a function that Dynamo must not trace. `fullgraph=True` "
            "fails, and a model has a graph break per layer. Losses call `.item()`.",
            known=MEASURED,
            links=(f"{LIGER}/issues/174",),
            here="Patched Llama, Qwen 3 and Gemma 2 are one graph each, and other labels cause no recompilation.",
            tests=(
                "integration/test_compiled_families.py::test_compiled_loss_equals_eager_with_and_without_ignored_labels",
                "integration/test_compiled_families.py::test_batches_of_any_size_share_at_most_three_graphs",
                "models/test_compile.py::test_training_step_is_one_graph_of_named_ops_without_logits",
                "ops/test_registration.py::test_inductor_equals_eager_without_recompiling",
            ),
        ),
        Hazard(
            name="A tensor on another GPU than the current one",
            elsewhere="Triton launches on the current device. With `device_map='auto'` the losses, RoPE and LayerNorm "
            "do not switch devices, so the best outcome is an error.",
            known=REPORTED,
            links=(f"{LIGER}/issues/401", f"{LIGER}/issues/593", f"{LIGER}/issues/1303"),
            here="Every launch uses the tensor's device and its current stream.",
            tests=(
                "ops/test_on_gpu.py::test_tensor_on_another_than_the_current_device_gives_the_same_result",
                "ops/test_on_gpu.py::test_side_stream_and_worker_thread_get_the_same_result",
            ),
        ),
    ),
}

CASES = {
    "P01": "per family: loss, gradients, evaluation logits, greedy generation, checkpointing, packing, tied head",
    "P02": "any PEFT tuner on the head; `modules_to_save` under another name; `disable_adapter`",
    "P03": "a biased, quantised or hooked head; a custom loss function",
    "P04": "a frozen trunk under a trainable head",
    "P05": "FSDP2 with the head in the root or its own unit, with PEFT; ZeRO-3; DTensor",
    "P06": "`compute_metrics`, and `outputs.logits` in training",
    "P07": "labels, shift_labels, both; logits_to_keep; num_items_in_batch as int, tensor and 0",
    "P08": "a second model of the process; torch's own names; undo; patching twice",
    "P09": "an unknown model type; a subclass with its own forward; remote code",
    "P10": "eps = 0; an attribute renamed; an attribute missing",
    "P11": "the oldest and newest transformers; no modeling file at import",
}

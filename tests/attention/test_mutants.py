"""The mistakes that published codes make, put into ours: for each, the tests named here turn red."""

from functools import partial

import pytest
import torch

from attention import test_contract as contract
from attention import test_contract_blocks as contract_blocks
from attention import test_contract_packed as contract_packed
from attention import test_exact_features as exact_features
from attention import test_focused as focused
from attention import test_formulas as formulas
from attention import test_llops as llops
from attention import test_performer as performer
from attention import test_polysketch_heavy as polysketch_heavy
from attention import test_squared_polynomial as squared_polynomial
from attention.cases import CASES, CAUSAL_CASES, COMPLETE_CASES, HEADS, Case, heavy
from attention.mutation import Mutant, apply
from feature_maps import test_elementwise as elementwise
from feature_maps import test_exact_features as packing
from feature_maps import test_focused as focused_features
from feature_maps import test_gaussian_sketch as gaussian_sketch
from feature_maps import test_performer as performer_features
from feature_maps import test_polarity as polarity_features
from feature_maps import test_srht_sketch as srht_sketch
from feature_maps import test_symmetric_powers as symmetric_powers
from ops import test_delta as delta_op
from ops import test_heavy as heavy_op
from ops import test_hyper as hyper_op
from ops import test_hyper_capping as capping
from ops import test_hyper_sort_lsh as hashing
from ops import test_landmark as landmarks
from ops import test_linear_backends as linear_backends
from ops import test_squared_polynomial as squares
from polysketch import attention, ops
from polysketch.attention import (
    PolynomialAttention,
    PolysketchAttention,
    PolysketchPaperAttention,
)
from polysketch.attention import polysketch as polysketch_module
from polysketch.attention import polysketch_heavy as polysketch_heavy_module
from polysketch.attention.beside_window import BesideWindow
from polysketch.attention.convolved import ConvolvedAttention
from polysketch.attention.heavy_state import HeavyState
from polysketch.feature_maps import (
    FocusedFeatures,
    GaussianSketch,
    LowRankSketch,
    PerformerFeatures,
    SRHTSketch,
)
from polysketch.feature_maps import elementwise as elementwise_map
from polysketch.feature_maps import focused as focused_map
from polysketch.feature_maps import hedgehog as hedgehog_map
from polysketch.feature_maps import packing as packing_map
from polysketch.feature_maps import performer as performer_map
from polysketch.feature_maps import taylor as taylor_map
from polysketch.feature_maps.polarity import PolarityFeatures
from polysketch.feature_maps.symmetric_powers import SymmetricPowers
from polysketch.ops import blocks, landmark, local, softmax
from polysketch.ops import heavy as heavy_ops
from polysketch.ops.delta import chunked as chunked_delta
from polysketch.ops.delta import operator as delta_operator
from polysketch.ops.heavy import candidates as heavy_candidates
from polysketch.ops.heavy import correction as heavy_correction
from polysketch.ops.heavy import tile_pairs as heavy_tile_pairs
from polysketch.ops.hyper import approximate as hyper_approximate
from polysketch.ops.hyper import capping as hyper_capping
from polysketch.ops.hyper import part as hyper_part
from polysketch.ops.hyper import samples as hyper_samples
from polysketch.ops.hyper import sort_lsh as hyper_sort_lsh
from polysketch.ops.linear import blocks as linear_blocks
from polysketch.ops.linear.piece import Piece
from polysketch.ops.packed import PackedDocuments
from polysketch.ops.polynomial import squared_reference
from polysketch.ops.random_features import reference as random_features
from polysketch.ops.window import api as window

polysketch_window = attention.MECHANISMS["polysketch-window"]
SEEN = next(case for case in CASES if case.name == "polysketch-window")
SOFTMAX, WINDOW = (next(case for case in CASES if case.name == name) for name in ("softmax", "sliding-window"))
WITHIN_CHUNKS, SEVERAL_CHUNKS, CUT_BLOCKS, LONG_BLOCKS = (
    next(case for case in linear_backends.BLOCKS if case.block_size == size) for size in (4, 32, 5, 270)
)
WRITTEN = next(case for case in CASES if case.name == "polysketch")


def case_of(name: str, **options) -> Case:
    """The contract case with these options."""
    return next(case for case in CASES if case.name == name and case.options == options)


MUTANTS = {
    "softmax: scores without 1 / sqrt(head_dim)": Mutant(
        softmax.masked_attention,
        "query.shape[3] ** -0.5 if scale is None",
        "1.0 if scale is None",
        (formulas.test_softmax_attention_is_its_formula,),
    ),
    "polynomial: no 1 in the denominator": Mutant(
        PolynomialAttention.attend,
        "offset=_OFFSET",
        "offset=0.0",
        (partial(formulas.test_polynomial_attention_is_its_formula, 4, 0.1),),
    ),
    "polysketch: 1 / r for sqrt(1 / r), Gaussian": Mutant(
        GaussianSketch._scaled,
        "self.feature_dim**-0.25",
        "self.feature_dim**-0.5",
        (partial(gaussian_sketch.test_the_features_follow_the_recursion_of_algorithm_1, 4),),
    ),
    "polysketch: 1 / r for sqrt(1 / r), Hadamard": Mutant(
        SRHTSketch.project,
        "self.feature_dim**-0.25",
        "self.feature_dim**-0.5",
        (partial(srht_sketch.test_the_features_follow_the_definition_with_matrices, degree=4, share="layer"),),
    ),
    "polysketch: one sketch for both factors": Mutant(
        GaussianSketch.project,
        "list(joined.chunk(matrices.shape[1], dim=-1))",
        "[joined.chunk(matrices.shape[1], dim=-1)[0]] * matrices.shape[1]",
        (partial(gaussian_sketch.test_the_features_follow_the_recursion_of_algorithm_1, 4),),
    ),
    "polysketch: the learned sketch takes normed vectors": Mutant(
        PolysketchPaperAttention.operands,
        "((query, key) if self.learned else normed)",
        "normed",
        (partial(formulas.test_polysketch_attention_is_its_formula, True),),
    ),
    "polysketch: the random sketch takes vectors as they are": Mutant(
        PolysketchPaperAttention.operands,
        "((query, key) if self.learned else normed)",
        "(query, key)",
        (partial(formulas.test_polysketch_attention_is_its_formula, False),),
    ),
    "llops: keys mapped by the queries' factors": Mutant(
        LowRankSketch.map_keys,
        "self.key_factors",
        "self.query_factors",
        (
            partial(
                llops.test_the_papers_attention_is_a_sum_of_values_with_weights_of_either_sign,
                degree=4,
                rank=2,
                kv_heads=HEADS,
            ),
        ),
    ),
    "polysketch-window: the token that leaves the window is seen by neither part": Mutant(
        BesideWindow._far,
        "delayed(wide, self.window)",
        "delayed(wide, self.window + 1)",
        (partial(contract.test_the_last_token_sees_every_token_it_should_and_no_other, SEEN),),
    ),
    "polysketch-window: a token of the window is sketched too": Mutant(
        BesideWindow._far,
        "delayed(kept, self.window)",
        "delayed(kept, self.window - 1)",
        (partial(formulas.test_polysketch_window_attention_is_its_formula, "codes"),),
    ),
    "polysketch-window: masked tokens are added to the sums": Mutant(
        polysketch_window._features,
        "without_masked(key_features, key_mask)",
        "key_features",
        (partial(contract.test_left_padding_changes_nothing, SEEN, 13),),
    ),
    "polysketch-window: decoding forgets what leaves in the same call": Mutant(
        BesideWindow._leaving,
        "[:, :, :new]",
        "[:, :, -new:]",
        (partial(contract.test_forward_equals_extend_over_a_split, SEEN, [8, 8, 8, 8, 5]),),
    ),
    "polysketch-window: a new token is added to the sums in place of the one it replaces": Mutant(
        BesideWindow._move,
        "return recent.buffers(kept, value), leaving",
        "return recent.buffers(kept, value), (kept, value)",
        (partial(contract.test_forward_equals_extend_over_a_split, SEEN, [33, 1, 1, 1, 1]),),
    ),
    "polysketch: sums only add": Mutant(
        polysketch_module._answers,
        "ops.delta_attention(query_features, key_features, value, strength, factors=2)",
        "ops.linear_attention(query_features, key_features, value * strength[..., None], factors=2, causal=True,"
        " normalize=False).output",
        (partial(formulas.test_the_delta_rule_beside_a_window_is_its_formula, HEADS, True, "unrotated"),),
    ),
    "polysketch: decoding writes what a new sequence would": Mutant(
        ops.delta_attention_extend_,
        "_writes(inputs, factors",
        "_writes(inputs._replace(sums=None), factors",
        (partial(contract.test_forward_equals_extend_over_a_split, WRITTEN, [33, 2, 2]),),
    ),
    "polysketch: a query does not see whether to trust what it recalls": Mutant(
        PolysketchAttention._recall,
        "scale[:, None] * confidence",
        "0.0 * confidence",
        (partial(formulas.test_the_delta_rule_beside_a_window_is_its_formula, HEADS, True, "unrotated"),),
    ),
    "delta: strengths are those of the tokens that ask": Mutant(
        chunked_delta._inverse,
        "weights * strength.mT",
        "weights * strength",
        (partial(delta_op.test_every_backend_writes_what_the_definition_does, "chunked", 2, 33, False),),
    ),
    "delta: a chunk does not see the chunks before it": Mutant(
        chunked_delta.errors,
        "rest[:, :, chunk] - written @ sums",
        "rest[:, :, chunk]",
        (partial(delta_op.test_every_backend_writes_what_the_definition_does, "chunked", 2, 150, False),),
    ),
    "delta: the gradient of keys forgets the tokens that ask": Mutant(
        delta_operator.gradients,
        "of_query.to(of_value.dtype) + _early(of_key)",
        "_early(of_key)",
        (partial(delta_op.test_gradients_of_every_backend_are_those_of_the_definition, "chunked", 2, False),),
    ),
    "sliding-window: one token too many": Mutant(
        window._attend,
        "min(window, key.shape[2]) - 1",
        "min(window, key.shape[2] - 1)",
        (
            partial(
                contract.test_the_last_token_sees_every_token_it_should_and_no_other,
                case_of("sliding-window", window=9),
            ),
        ),
    ),
    "local: chunks from the tensor's start, not a row's first real token": Mutant(
        local.local_attention,
        "align(key_mask, None, key) if opened is None",
        "None if opened is None",
        (partial(contract.test_left_padding_changes_nothing, case_of("local", local_chunk=8), 5),),
    ),
    "nystrom: the inverse's scale taken over the batch": Mutant(
        landmark.iterative_inverse,
        "size.sum(-1).amax(-1) * size.sum(-2).amax(-1)",
        "(size.sum(-1).amax() * size.sum(-2).amax()).expand(matrix.shape[:-2])",
        (
            landmarks.test_the_scale_of_the_inverse_is_that_of_each_matrix_so_rows_do_not_change_one_another,
            partial(contract.test_rows_of_the_batch_do_not_influence_one_another, case_of("nystrom", num_landmarks=6)),
        ),
    ),
    "skyformer: 32^(-1/4) whatever the head": Mutant(
        landmark.skyformer_attention,
        "query * query.shape[3] ** -0.25, key * key.shape[3] ** -0.25",
        "query * 32**-0.25, key * 32**-0.25",
        (landmarks.test_skyformer_is_its_formula,),
    ),
    "based: packed products without sqrt(2)": Mutant(
        packing_map.pack_square,
        "math.sqrt(2.0) * ",
        "",
        (
            partial(packing.test_packed_products_have_the_squared_inner_product, 5),
            partial(exact_features.test_based_attention_is_its_formula, feature_dim=5, kv_heads=2, causal=True),
        ),
    ),
    "based: 16^(-1/4) whatever the width": Mutant(
        taylor_map._expand,
        "x.shape[-1] ** -0.25",
        "16**-0.25",
        (partial(exact_features.test_based_attention_is_its_formula, feature_dim=5, kv_heads=2, causal=True),),
    ),
    "symmetric-power: packed products without sqrt(2)": Mutant(
        packing_map.pack_square,
        "math.sqrt(2.0) * ",
        "",
        (
            partial(
                exact_features.test_the_symmetric_power_is_polynomial_attention_of_its_degree,
                degree=4,
                kv_heads=HEADS,
                causal=True,
            ),
        ),
    ),
    "hedgehog: one softmax over both signs": Mutant(
        hedgehog_map._both_signs,
        "torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)",
        "torch.cat([x, -x], -1).softmax(-1)",
        (partial(exact_features.test_hedgehog_attention_is_its_formula, num_features=None, kv_heads=4, causal=True),),
    ),
    "linear: one added to elu": Mutant(
        elementwise_map.elu_plus_one,
        "torch.where(x > 0, x + 1, x.clamp(max=0).exp())",
        "torch.nn.functional.elu(x) + 1",
        (elementwise.test_elu_plus_one_stays_positive_where_adding_one_would_round_to_zero,),
    ),
    "performer: keys less their maximum over all positions": Mutant(
        random_features._softmax_features,
        "exponent - key_constant",
        "exponent - exponent.amax()",
        (
            partial(performer.test_a_loud_key_to_come_changes_nothing_before_it, 1.0),
            performer_features.test_a_keys_features_depend_on_it_alone_whatever_the_scale,
        ),
    ),
    "performer: signs of R not given to Q": Mutant(
        performer_map.orthogonal_rows,
        " * triangle.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]",
        "",
        (performer_features.test_the_directions_of_a_block_are_uniform,),
    ),
    "performer: all rows of the length sqrt(head_dim)": Mutant(
        performer_map.orthogonal_rows,
        "gaussian_rows(rows, width, generator).norm(dim=-1, keepdim=True)",
        "width**0.5",
        (partial(performer_features.test_every_row_is_gaussian, True),),
    ),
    "performer: redrawn from the global generator": Mutant(
        PerformerFeatures.resample,
        "begin_draw(int(self.next_seed), self.next_seed)",
        "torch.default_generator",
        (performer_features.test_a_seed_gives_the_function_and_each_redraw_another,),
    ),
    "focused: norms over the channels of one head": Mutant(
        focused_map._norm,
        "(1, 4)",
        "4",
        (
            focused_features.test_a_tokens_heads_share_one_length,
            partial(focused_features.test_features_are_their_formula_over_the_whole_token, 3.0),
        ),
    ),
    "focused: cubes in half precision": Mutant(
        FocusedFeatures.map,
        "x.to(torch.promote_types(x.dtype, torch.float32))",
        "x",
        (partial(focused_features.test_cubes_of_half_precision_are_taken_in_float32, torch.float16),),
    ),
    "focused: masked tokens counted in the mean": Mutant(
        ConvolvedAttention.forward,
        "_keys_seen(wide, key_mask) if causal",
        "_keys_seen(wide, None) if causal",
        (partial(focused.test_masked_tokens_are_not_counted_in_the_mean, "focused"),),
    ),
    "squared-polynomial: packed products without the root of their number": Mutant(
        SymmetricPowers.map,
        " * self.orders.to(x.dtype).sqrt()",
        "",
        (
            partial(symmetric_powers.test_the_products_of_each_slice_are_a_power_of_the_inner_product, 6, 3),
            partial(squared_polynomial.test_all_ones_are_the_naive_formula, linear=True, degree=2),
        ),
    ),
    "squared-polynomial: a masked key weighs the square of the constant term": Mutant(
        squared_reference.reference_squared_polynomial_attention,
        "if key_mask is not None:  # a masked key",
        "if False:  # a masked key",
        (partial(squares.test_masked_tokens_change_nothing_whatever_stands_in_them, "reference"),),
    ),
    "polarity: opposite signs read as the same": Mutant(
        PolarityFeatures.opposed,
        "features.roll(self.head_dim, -1)",
        "features",
        (polarity_features.test_opposed_features_are_those_of_the_opposite_vector,),
    ),
    "polysketch-heavy: candidates inside the chunk too, beside its exact weights": Mutant(
        heavy_ops.chunk_edges,
        "before = steps - steps % chunk",
        "before = steps",
        (
            partial(
                polysketch_heavy.test_with_one_bucket_that_holds_all_keys_it_is_exact_and_so_are_its_gradients, True
            ),
        ),
    ),
    "polysketch-heavy: the hash tells q from -q": Mutant(
        heavy_ops.line_codes,
        "torch.where(codes & 1 == 1, codes, opposite) >> 1",
        "codes >> 1",
        (
            heavy_op.test_a_vector_and_its_opposite_share_a_bucket,
            polysketch_heavy.test_a_query_and_its_opposite_get_the_same,
        ),
    ),
    "polysketch-heavy: exact weights beside the sketched ones": Mutant(
        heavy_correction._weights,
        "weights.sub_(sketched)",
        "weights",
        (partial(heavy_op.test_output_and_gradients_are_those_of_the_definition, 333, 16, 4, 11, True, True),),
    ),
    "polysketch-heavy: the first keys of the bucket, not the last": Mutant(
        heavy_candidates.SortedKeys.before,
        "return torch.maximum(self.rank(codes, 0), upper - size), upper",
        "return self.rank(codes, 0), torch.minimum(self.rank(codes, 0) + size, upper)",
        (partial(heavy_op.test_output_and_gradients_are_those_of_the_definition, 333, 16, 4, 11, True, False),),
    ),
    "polysketch-heavy: neighbouring tiles of keys share a rank": Mutant(
        heavy_tile_pairs.make_pairs,
        "(pair - (total - counts)[tile]) * KEYS",
        "(pair - (total - counts)[tile]) * (KEYS - 1)",
        (
            partial(
                heavy_op.test_every_candidate_is_in_one_pair_and_nothing_else_is, (2, 500, 900, 3, 1000), False, True
            ),
        ),
    ),
    "polysketch-heavy: a chunk is remembered one chunk late": Mutant(
        HeavyState.span,
        "index(end - end % chunk), slots",
        "index(boundary), slots",
        (partial(contract.test_forward_equals_extend_over_a_split, heavy(), [8, 8, 8, 8, 5]),),
    ),
    "polysketch-heavy: masked tokens of the open chunk are remembered": Mutant(
        polysketch_heavy_module._masked,
        "codes if key_mask is None else codes.masked_fill(~key_mask[:, None], -1)",
        "codes",
        (partial(contract.test_left_padding_changes_nothing, heavy(), 13),),
    ),
    "blocks: a window reaches to the end of it in its own block": Mutant(
        window._attend_by_blocks,
        "block=block)",
        "block=0)",
        (partial(contract_blocks.test_a_token_sees_its_own_block_and_nothing_of_later_ones, WINDOW, 4),),
    ),
    "blocks: those of padded rows count from the first token": Mutant(
        blocks.in_aligned_rows,
        "leading_padding(key_mask[:, earlier:])",
        "0 * leading_padding(key_mask[:, earlier:])",
        (
            partial(contract_blocks.test_blocks_count_from_the_first_real_token, SOFTMAX, 4, 5),
            partial(contract_blocks.test_blocks_count_from_the_first_real_token, WINDOW, 4, 5),
        ),
    ),
    "blocks: one row of the mask too far": Mutant(
        blocks.seen_by_blocks,
        "of_rows[:, None] >= of_keys",
        "of_rows[:, None] + 1 >= of_keys",
        (partial(contract_blocks.test_a_token_sees_its_own_block_and_nothing_of_later_ones, SOFTMAX, 4),),
    ),
    "blocks: the padding of a packed document counts": Mutant(
        PackedDocuments.masks_for,
        "causal and block_size in (None, 1)",
        "causal",
        (partial(contract_blocks.test_packed_documents_have_blocks_of_their_own, SOFTMAX, 4),),
    ),
    "blocks: later chunks of the own block are left out": Mutant(
        linear_blocks._with_later_chunks,
        "before.output + output, plan.offset + before.denominator + mass",
        "before.output, plan.offset + before.denominator",
        (partial(linear_backends.test_chunked_agrees_with_reference, SEVERAL_CHUNKS),),
    ),
    "blocks: a long block reads the sums before it alone": Mutant(
        linear_blocks._through,
        ".cumsum(1)\n",
        ".cumsum(1).roll(1, 1)\n",
        (partial(linear_backends.test_chunked_agrees_with_reference, LONG_BLOCKS),),
    ),
    "blocks: a chunk of features cuts blocks": Mutant(
        linear_blocks.with_chunk,
        "max(1, chunk // block) * block",
        "max(1, chunk // block) * block + 1",
        (partial(linear_backends.test_chunked_agrees_with_reference, CUT_BLOCKS),),
    ),
    "blocks: the mask inside a chunk is causal": Mutant(
        Piece._block_mask,
        "of_keys = torch.arange(keys, device=device) // block",
        "of_keys = torch.arange(keys, device=device).add(block - 1) // block",
        (partial(linear_backends.test_chunked_agrees_with_reference, WITHIN_CHUNKS),),
    ),
    "hyper: sorted by the Gray code, not by its inverse": Mutant(
        hyper_sort_lsh.gray_rank,
        "(1, 2, 4, 8, 16, 32)",
        "(1,)",
        (partial(hashing.test_buckets_sorted_by_their_rank_differ_from_the_next_in_one_bit, 7),),
    ),
    "hyper: padded keys of a chunk count": Mutant(
        hyper_approximate._hide,
        ".masked_fill(~real, -torch.inf)",
        "",
        (partial(hyper_op.test_padding_counts_for_nothing, causal=False, sampling="uniform"),),
    ),
    "hyper: padded keys are drawn": Mutant(
        hyper_samples.draw_uniform,
        "priority.masked_fill(~real.unsqueeze(1), _LAST)",
        "priority",
        (partial(hyper_op.test_padding_counts_for_nothing, causal=False, sampling="uniform"),),
    ),
    "hyper: samples in the query's own chunk count, too": Mutant(
        hyper_samples.Samples.log_weights,
        "self.real.unsqueeze(-2) & ~covered",
        "self.real.unsqueeze(-2).expand_as(covered)",
        (
            hyper_op.test_no_entry_of_a_given_mask_counts_twice_where_all_keys_are_drawn,
            partial(hyper_op.test_the_estimated_numerator_is_unbiased_over_seeds, by_rank=True, sampling="norm"),
        ),
    ),
    "hyper: samples outside of the chunk stand for all keys": Mutant(
        hyper_samples.Samples.log_weights,
        "(count.unsqueeze(-1) - covered_count)",
        "(count.unsqueeze(-1) - 0 * covered_count)",
        (partial(hyper_op.test_the_estimated_denominator_is_unbiased_over_seeds, by_rank=True, sampling="uniform"),),
    ),
    "hyper: one draw by norms for the numerator and the denominator": Mutant(
        hyper_approximate.attend_approximately,
        "        mass = None\n",
        "        mass = sampled.log_sum\n",
        (
            partial(hyper_op.test_the_estimated_denominator_is_unbiased_over_seeds, by_rank=True, sampling="norm"),
            partial(hyper_op.test_outputs_are_unbiased_where_half_of_the_values_are_zero, causal=True, sampling="norm"),
        ),
    ),
    "hyper: the merged sum of weights is at least an eps": Mutant(
        hyper_part.merge,
        "torch.logaddexp(one, added)",
        "(one.exp() + added.exp()).clamp(min=1e-9).log()",
        (partial(hyper_op.test_sums_of_weights_far_from_one_are_no_less_exact, causal=False, shift=-200.0),),
    ),
    "hyper: no gradient through the shares of the merge": Mutant(
        hyper_part.merge,
        "(each - log_sum for each in (one, other))",
        "((each - log_sum).detach() for each in (one, other))",
        (partial(capping.test_output_and_gradients_are_those_of_algorithm_2, 2.0, 1.0, 16),),
    ),
    "hyper: keys drawn by the global generator": Mutant(
        hyper_samples.draw_uniform,
        "random_bits(seed, head, position)",
        "torch.randint(2**32, (heads, *position.shape))",
        (hyper_op.test_another_seed_gives_other_samples_and_the_same_seed_the_same,),
    ),
    "hyper: queries placed by their rank among queries, causal too": Mutant(
        hyper_sort_lsh.tiles_by_code,
        "torch.minimum((first + behind) // 2, last)",
        "torch.minimum(rank.argsort(-1).argsort(-1) // groups, last)",
        (partial(hyper_op.test_later_tokens_move_no_earlier_row_beyond_the_exact_ones_either, "uniform"),),
    ),
    "hyper: tau from later queries in causal attention": Mutant(
        hyper_capping.draw_rows_in_order,
        "(index == inside), True)",
        "(index == inside), False)",
        (partial(capping.test_with_bounds_too_later_tokens_move_no_earlier_row, "uniform"),),
    ),
    "hyper: no cap on sampled weights": Mutant(
        hyper_capping.bounded_mass,
        "torch.minimum(query * scale @ sampled_key.mT, log_cap.unsqueeze(-1))",
        "query * scale @ sampled_key.mT",
        (partial(capping.test_output_and_gradients_are_those_of_algorithm_2, 0.3, 2.0, 16),),
    ),
    "hyper: caps from above only": Mutant(
        hyper_capping.bounded_mass,
        "torch.maximum(log_sum, log_floor)",
        "log_sum",
        (partial(capping.test_output_and_gradients_are_those_of_algorithm_2, 2.0, 1.0, 16),),
    ),
    "packed rows: documents of one length in one row": Mutant(
        PackedDocuments.split,
        "unflatten(0, (len(group.documents), group.length))",
        "unsqueeze(0)",
        (partial(contract_packed.test_a_packed_row_equals_its_documents_apart, SEEN, True, contract_packed.EQUAL),),
    ),
    "packed rows: padding is seen": Mutant(
        PackedDocuments.masks,
        "if group.is_padded else None",
        "if not group.is_padded else None",
        (
            partial(
                contract_packed.test_a_packed_row_equals_its_documents_apart,
                CASES[0],
                False,
                contract_packed.LENGTHS,
            ),
        ),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_seen(name: str, monkeypatch: pytest.MonkeyPatch):
    apply(MUTANTS[name], monkeypatch)
    for test in MUTANTS[name].seen_by:
        with pytest.raises(AssertionError):
            test()


def see_the_next_value(forward):
    """A mistake that every mechanism can make: values one place too early."""
    return lambda query, key, value, **options: forward(query, key, value.roll(-1, 2), **options)


def mix_rows(forward):
    """Another: rows of the batch added up."""
    return lambda query, key, value, **options: forward(query, key, value.flip(0) + value, **options)


def forget(extend):
    """Another: decoding that forgets the tokens before."""

    def extend_alone(query, key, value, state, **options):
        extend(query, key, value, state, **options)
        empty = extend.__self__.init_state(query.shape[0], dtype=query.dtype)
        return extend(query, key, value, empty, **options)[0], state

    return extend_alone


def miss_a_start(forward_packed):
    """Another: the second of packed documents goes on where the first ends."""

    def joined(query, key, value, cu_seqlens, **options):
        return forward_packed(query, key, value, torch.cat([cu_seqlens[:1], cu_seqlens[2:]]), **options)

    return joined


MISTAKEN = ("softmax", "linear", "polysketch", "polysketch-heavy", "sliding-window")
"""A state of each kind."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name not in MISTAKEN)) for name in attention.MECHANISMS]
)
@pytest.mark.parametrize(
    ("method", "mistake", "seen_by"),
    [
        ("forward", mix_rows, contract.test_rows_of_the_batch_do_not_influence_one_another),
        ("forward", see_the_next_value, partial(contract.test_changing_tokens_changes_nothing_before_them, changed=11)),
        (
            "forward_packed",
            miss_a_start,
            lambda case: contract_packed.test_a_packed_row_equals_its_documents_apart(
                case, case.build().is_causal, contract_packed.LENGTHS
            ),
        ),
        ("extend", forget, partial(contract.test_forward_equals_extend_over_a_split, sizes=[9, 1, 1, 1, 25])),
    ],
    ids=["rows-mixed", "the-future-seen", "a-start-missed", "the-past-forgotten"],
)
def test_a_mistake_that_any_mechanism_can_make_is_seen(name, method, mistake, seen_by, monkeypatch):
    case = next(case for case in COMPLETE_CASES if case.name == name)
    if mistake in (see_the_next_value, forget) and case not in CAUSAL_CASES:
        pytest.skip("it sees the future by design, and has no state")
    build = Case.build

    def broken(self: Case, **options) -> attention.Mechanism:
        mechanism = build(self, **options)
        setattr(mechanism, method, mistake(getattr(mechanism, method)))
        return mechanism

    monkeypatch.setattr(Case, "build", broken)
    with pytest.raises(AssertionError):
        seen_by(case)

/* Exact products of the Hessian with a vector, forward over backward.
 *
 * Along a direction V of the weights W, with x a layer's input, z its output and g its output's gradient:
 *
 *     forward:   ż = ẋ∗W + x∗V                      only for outputs that pass pool and ReLU
 *     backward:  Ẇ-gradient = ġ·x + g·ẋ,  ẋ-gradient = ġ·W + g·V
 *
 * Pool and ReLU are linear wherever the network is differentiable, so the live outputs are those of the batch's
 * gradient, and they are listed once: `fdm_hessian_start` after `fdm_gradients`, then any number of products.
 */
#include <string.h>

#include "chain.h"

#define EXPORT __attribute__((visibility("default")))
#define SHARE 64 /* outputs whose sums are buffered */

/* Every output that passes pool and ReLU: by image and channel, its patch and its position. */
static void list_live(const Layer *l, int count) {
    int windows = l->map_h * l->map_w;
    long image = (long)l->in_h * l->in_w * l->in_c;
    int32_t n = 0;
    for (int i = 0; i < count; i++)
        for (int c = 0; c < l->outputs; c++) {
            l->live_start[(long)i * l->outputs + c] = n;
            for (int t = 0; t < windows; t++) {
                long place = in_map(l, l->out, i, t / l->map_w, t % l->map_w) + c - l->out;
                int q = l->pool == 2 ? l->argmax[((long)i * windows + t) * l->map_c + c] : 0;
                int y = t / l->map_w * l->pool + q / 2, x = t % l->map_w * l->pool + q % 2;
                l->live_place[n] = (int32_t)place;
                l->live_patch[n] = (int32_t)(i * image + ((long)y * l->in_w + x) * l->in_c);
                n += !(l->relu && l->out[place] <= 0);
            }
        }
    l->live_start[(long)count * l->outputs] = n;
}

/* Lists the live outputs of the batch whose gradient was just computed. 0 if out of memory. */
EXPORT int fdm_hessian_start(Chain *chain, int count) {
    int widest = 0;
    for (int i = 0; i < chain->layers; i++) {
        const Layer *l = chain->layer + i;
        if (l->kind == LINEAR) widest = smaller(widest, l->in_step) == widest ? l->in_step : widest;
        if (l->kind == LINEAR) widest = smaller(widest, l->out_step) == widest ? l->out_step : widest;
    }
    if (!chain->spare) {
        chain->no_bias = zeros(sizeof(float) * widest), chain->spare = zeros(sizeof(float) * chain->batch * (long)widest);
        if (!chain->no_bias || !chain->spare) return 0;
    }
    for (int i = 0; i < chain->layers; i++) {
        Layer *l = chain->layer + i, *next = i + 1 < chain->layers ? l + 1 : NULL;
        int convolution = l->kind == CONVOLUTION;
        long batch = chain->batch, step = l->out_step, slack = 0;
        if (convolution) step = (long)l->out_h * l->out_w * l->map_c;
        if (next && next->kind == CONVOLUTION) slack = next->row_floats;
        if (!l->out_tangent) {
            l->out_tangent = zeros(sizeof(float) * (batch * step + slack));
            l->out_grad_tangent = zeros(sizeof(float) * (batch * step + slack));
            if (next && next->kind == l->kind) next->in_tangent = l->out_tangent, next->in_grad_tangent = l->out_grad_tangent;
            if (next && next->kind != l->kind) {
                next->in_tangent = zeros(sizeof(float) * batch * next->in_step);
                next->in_grad_tangent = zeros(sizeof(float) * batch * next->in_step);
                if (!next->in_tangent || !next->in_grad_tangent) return 0;
            }
            if (!l->out_tangent || !l->out_grad_tangent) return 0;
        }
        if (!convolution) continue;
        if (!l->live_patch) {
            long size = l->exact ? 0 : sizeof(float) * (long)l->outputs * l->kernel_h * l->row_floats;
            long most = batch * l->map_h * l->map_w * l->outputs + 1;
            l->tangent_rows = zeros(size);
            l->live_patch = zeros(sizeof(int32_t) * most), l->live_place = zeros(sizeof(int32_t) * most);
            l->live_start = zeros(sizeof(int32_t) * (batch * l->outputs + 1));
            if (!l->tangent_rows || !l->live_patch || !l->live_place || !l->live_start)
                return 0;
        }
        memset(l->out_tangent, 0, sizeof(float) * (size_t)(batch * step));
        list_live(l, count);
    }
    return 1;
}

/* ż = ẋ∗W + x∗V + v, for outputs that pass pool and ReLU; the others are zero from the start */
static void convolution_tangent(const Layer *l, int count, const float *weight, const float *direction, const float *bias) {
    float sums[8 * SHARE];
    if (!l->exact) pack_rows(l, weight, l->rows), pack_rows(l, direction, l->tangent_rows);
    for (int i = 0; i < count; i++)
        for (int c = 0; c < l->outputs; c++) {
            const int32_t *start = l->live_start + (long)i * l->outputs + c;
            for (int32_t e = start[0]; e < start[1]; e += SHARE) {
                int some = smaller(SHARE, start[1] - e);
                const int32_t *patch = l->live_patch + e;
                memset(sums, 0, sizeof sums);
                project_patches(l, c, patch, some, l->in, direction, l->tangent_rows, sums);
                if (l->in_tangent) project_patches(l, c, patch, some, l->in_tangent, weight, l->rows, sums);
                for (int j = 0; j < some; j += 8) {
                    vec b[8], total = splat(bias[c]);
                    UNROLL for (int k = 0; k < 8; k++) b[k] = load(sums + 8 * (j + k));
                    transpose(b);
                    UNROLL for (int k = 0; k < 8; k++) total += b[k];
                    for (int k = 0; k < smaller(8, some - j); k++) l->out_tangent[l->live_place[e + j + k]] = total[k];
                }
            }
        }
}

/* ż = ẋ Wᵀ + x Vᵀ + v */
static void linear_tangent(const Layer *l, int count, const float *weight, const float *direction, const float *bias,
                           const float *zero, float *other) {
    linear_forward(l, count, direction, bias, l->in, l->out_tangent, 0);
    linear_forward(l, count, weight, zero, l->in_tangent, other, 0);
    for (int i = 0; i < count; i++)
        for (int o = 0; o < l->outputs; o++) {
            long at = (long)i * l->out_step + o;
            l->out_tangent[at] = l->relu && l->out[at] <= 0 ? 0 : l->out_tangent[at] + other[at];
        }
}

/* product = scale · H · direction for the summed loss of the batch that `fdm_hessian_start` was called for; the gradient
 * must have been computed with the same scale. */
EXPORT void fdm_hessian_product(Chain *chain, int count, float scale, const float *parameters, const float *direction,
                                float *product) {
    float *other = chain->spare;
    for (int i = 0; i < chain->layers; i++) {
        const Layer *l = chain->layer + i;
        if (l->kind == CONVOLUTION) {
            convolution_tangent(l, count, parameters + l->weight, direction + l->weight, direction + l->bias);
            continue;
        }
        if (l[-1].kind == CONVOLUTION) flatten(l - 1, l, count, l[-1].out_tangent, l->in_tangent);
        linear_tangent(l, count, parameters + l->weight, direction + l->weight, direction + l->bias, chain->no_bias,
                       other);
    }
    cross_entropy_tangent(chain->layer + chain->layers - 1, count, scale, other);
    for (int i = chain->layers - 1; i >= 0; i--) {
        const Layer *l = chain->layer + i;
        float *weight = product + l->weight, *bias = product + l->bias;
        if (l->kind == CONVOLUTION) {
            convolution_backward(chain, l, count, l->out_grad_tangent, l->in, parameters + l->weight, weight, bias,
                                 l->in_grad_tangent, 0);
            if (l->in_tangent)
                convolution_backward(chain, l, count, l->out_grad, l->in_tangent, direction + l->weight, weight, NULL,
                                     l->in_grad_tangent, 1);
            continue;
        }
        relu_backward(l, count, l->out_grad_tangent);
        linear_weight_grad(l, count, l->out_grad_tangent, l->in, weight, 0);
        linear_weight_grad(l, count, l->out_grad, l->in_tangent, weight, 1);
        linear_bias_grad(l, count, l->out_grad_tangent, bias);
        linear_in_grad(l, count, l->out_grad_tangent, parameters + l->weight, l->in_grad_tangent);
        linear_in_grad(l, count, l->out_grad, direction + l->weight, other);
        for (long at = 0; at < (long)count * l->in_step; at++) l->in_grad_tangent[at] += other[at];
        if (l[-1].kind == CONVOLUTION) unflatten(l - 1, l, count, l->in_grad_tangent, l[-1].out_grad_tangent);
    }
}

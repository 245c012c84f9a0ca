/* Exact products of the Hessian with a vector, forward over backward.
 *
 * Along a direction V of the weights W, with x a layer's input, z its output and g its output's gradient:
 *
 *     forward:   ż = ẋ∗W + x∗V                      only for outputs that pool and ReLU let through
 *     backward:  Ẇ-gradient = ġ·x + g·ẋ,  ẋ-gradient = ġ·W + g·V
 *
 * Pool and ReLU are linear wherever the network is differentiable, so the outputs that live are those of the batch's
 * gradient, and they are listed once: `fdm_hessian_start` after `fdm_gradients`, then any number of products.
 */
#include <stdlib.h>
#include <string.h>

#include "chain.h"

#define EXPORT __attribute__((visibility("default")))
#define PART 6 /* vectors of a filter and of its direction that stay in registers together */
#define SHARE 64 /* outputs of a channel whose sums are kept meanwhile */

static int row_vecs(const Layer *l) { return (l->kernel_w * l->in_c + 7) / 8; }

/* Filters with rows of whole vectors: [output][kernel row][8 · row_vecs] */
static void pad_filters(const Layer *l, const float *weight, float *to) {
    int step = 8 * row_vecs(l);
    for (long row = 0; row < (long)l->outputs * l->kernel_h; row++)
        for (int x = 0; x < l->kernel_w; x++)
            memcpy(to + row * step + x * l->in_c, weight + (row * l->kernel_w + x) * l->inputs, sizeof(float) * (size_t)l->inputs);
}

static void unpad_filters(const Layer *l, const float *from, float *weight) {
    int step = 8 * row_vecs(l);
    for (long row = 0; row < (long)l->outputs * l->kernel_h; row++)
        for (int x = 0; x < l->kernel_w; x++)
            memcpy(weight + (row * l->kernel_w + x) * l->inputs, from + row * step + x * l->in_c, sizeof(float) * (size_t)l->inputs);
}

/* sums[e] += a[patch e] · w + b[patch e] · v */
INLINE void project(const int VECS, const int32_t *patch, int count, const float *a, const float *b, const float *w,
                    const float *v, float *sums) {
    vec wv[PART], vv[PART];
    UNROLL for (int k = 0; k < VECS; k++) wv[k] = load(w + 8 * k), vv[k] = load(v + 8 * k);
    for (int e = 0; e < count; e++) {
        vec s = load(sums + 8L * e), t = splat(0);
        const float *p = a + patch[e], *q = b + patch[e];
        UNROLL for (int k = 0; k < VECS; k++) s += load(p + 8 * k) * wv[k], t += load(q + 8 * k) * vv[k];
        store(sums + 8L * e, s + t);
    }
}

/* d += Σ g · a[patch] + h · b[patch] */
INLINE void collect(const int VECS, const int32_t *patch, int count, const float *g, const float *h, const float *a,
                    const float *b, float *d) {
    vec s[PART], t[PART];
    UNROLL for (int k = 0; k < VECS; k++) s[k] = load(d + 8 * k), t[k] = splat(0);
    for (int e = 0; e < count; e++) {
        vec x = splat(g[e]), y = splat(h[e]);
        const float *p = a + patch[e], *q = b + patch[e];
        UNROLL for (int k = 0; k < VECS; k++) s[k] += x * load(p + 8 * k), t[k] += y * load(q + 8 * k);
    }
    UNROLL for (int k = 0; k < VECS; k++) store(d + 8 * k, s[k] + t[k]);
}

/* d[patch] += g · w + h · v */
INLINE void scatter(const int VECS, const int32_t *patch, int count, const float *g, const float *h, const float *w,
                    const float *v, float *d) {
    vec wv[PART], vv[PART];
    UNROLL for (int k = 0; k < VECS; k++) wv[k] = load(w + 8 * k), vv[k] = load(v + 8 * k);
    for (int e = 0; e < count; e++) {
        vec x = splat(g[e]), y = splat(h[e]);
        float *p = d + patch[e];
        UNROLL for (int k = 0; k < VECS; k++) store(p + 8 * k, load(p + 8 * k) + x * wv[k] + y * vv[k]);
    }
}

#define PARTS(F, ...) \
    switch (some) { \
    case 1: F(1, __VA_ARGS__); break; \
    case 2: F(2, __VA_ARGS__); break; \
    case 3: F(3, __VA_ARGS__); break; \
    case 4: F(4, __VA_ARGS__); break; \
    case 5: F(5, __VA_ARGS__); break; \
    default: F(6, __VA_ARGS__); \
    }

/* Every output that has a gradient whatever comes behind it: by channel, its patch and its place. */
static void list_live(const Layer *l, int count) {
    int windows = l->map_h * l->map_w;
    long image = (long)l->in_h * l->in_w * l->in_c;
    int32_t n = 0;
    for (int c = 0; c < l->outputs; c++) {
        l->live_start[c] = n;
        for (int i = 0; i < count; i++)
            for (int t = 0; t < windows; t++) {
                long place = in_map(l, l->out, i, t / l->map_w, t % l->map_w) + c - l->out;
                int q = l->pool == 2 ? l->argmax[((long)i * windows + t) * l->map_c + c] : 0;
                int y = t / l->map_w * l->pool + q / 2, x = t % l->map_w * l->pool + q % 2;
                l->live_place[n] = (int32_t)place;
                l->live_patch[n] = (int32_t)(i * image + ((long)y * l->in_w + x) * l->in_c);
                n += !(l->relu && l->out[place] <= 0);
            }
    }
    l->live_start[l->outputs] = n;
}

/* Lists the live outputs of the batch whose gradient was just computed. 0 if there is no memory. */
EXPORT int fdm_hessian_start(Chain *chain, int count, const float *parameters) {
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
            long size = sizeof(float) * (long)l->outputs * l->kernel_h * 8 * row_vecs(l);
            long most = batch * l->map_h * l->map_w * l->outputs + 1;
            if (i == 0) l->in_tangent = zeros(sizeof(float) * (batch * l->in_h * l->in_w * l->in_c + l->row_floats));
            l->filters = zeros(size), l->filters_tangent = zeros(size), l->filters_grad = zeros(size);
            l->live_patch = zeros(sizeof(int32_t) * most), l->live_place = zeros(sizeof(int32_t) * most);
            l->live_start = zeros(sizeof(int32_t) * (l->outputs + 1));
            if (!l->in_tangent || !l->filters || !l->filters_tangent || !l->filters_grad || !l->live_patch || !l->live_place || !l->live_start)
                return 0;
        }
        memset(l->out_tangent, 0, sizeof(float) * (size_t)(batch * step));
        pad_filters(l, parameters + l->weight, l->filters);
        list_live(l, count);
    }
    return 1;
}

static void convolution_tangent(const Layer *l, const float *bias) {
    int vecs = row_vecs(l), step = 8 * vecs;
    float sums[8 * SHARE];
    for (int c = 0; c < l->outputs; c++)
        for (int32_t e = l->live_start[c]; e < l->live_start[c + 1]; e += SHARE) {
            int count = smaller(SHARE, l->live_start[c + 1] - e);
            memset(sums, 0, sizeof(float) * 8 * (size_t)count);
            for (int y = 0; y < l->kernel_h; y++)
                for (int k = 0; k < vecs; k += PART) {
                    int some = smaller(PART, vecs - k);
                    long w = ((long)c * l->kernel_h + y) * step + 8 * k, x = (long)y * l->in_w * l->in_c + 8 * k;
                    PARTS(project, l->live_patch + e, count, l->in_tangent + x, l->in + x, l->filters + w,
                          l->filters_tangent + w, sums)
                }
            for (int j = 0; j < count; j++) l->out_tangent[l->live_place[e + j]] = sum(load(sums + 8 * j)) + bias[c];
        }
}

static void convolution_grad_tangent(const Layer *l, int count, float *weight, float *bias, int input) {
    int vecs = row_vecs(l), step = 8 * vecs;
    float g[SHARE], h[SHARE];
    memset(l->filters_grad, 0, sizeof(float) * (size_t)l->outputs * (size_t)(l->kernel_h * step));
    if (input) memset(l->in_grad_tangent, 0, sizeof(float) * (size_t)count * (size_t)(l->in_h * l->in_w * l->in_c));
    for (int c = 0; c < l->outputs; c++) {
        float total = 0;
        for (int32_t e = l->live_start[c]; e < l->live_start[c + 1]; e += SHARE) {
            int some_live = smaller(SHARE, l->live_start[c + 1] - e);
            for (int j = 0; j < some_live; j++) {
                int32_t place = l->live_place[e + j];
                g[j] = l->out_grad_tangent[place], h[j] = l->out_grad[place];
                total += g[j];
            }
            for (int y = 0; y < l->kernel_h; y++)
                for (int k = 0; k < vecs; k += PART) {
                    int some = smaller(PART, vecs - k);
                    long w = ((long)c * l->kernel_h + y) * step + 8 * k, x = (long)y * l->in_w * l->in_c + 8 * k;
                    PARTS(collect, l->live_patch + e, some_live, g, h, l->in + x, l->in_tangent + x, l->filters_grad + w)
                    if (input)
                        PARTS(scatter, l->live_patch + e, some_live, g, h, l->filters + w, l->filters_tangent + w,
                              l->in_grad_tangent + x)
                }
        }
        bias[c] = total;
    }
    unpad_filters(l, l->filters_grad, weight);
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
            pad_filters(l, direction + l->weight, l->filters_tangent);
            convolution_tangent(l, direction + l->bias);
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
            convolution_grad_tangent(l, count, weight, bias, i > 0);
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

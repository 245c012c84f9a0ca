/* The exported functions: create a chain once, then train or evaluate it batch by batch. */
#include "chain.h"

#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define SPEC 10 /* numbers that describe a layer */
#define LARGE (256L << 10) /* weights, more than fit in the cache between images */

void *zeros(long bytes) {
    void *p = NULL;
    bytes = (bytes + 127) & ~63L;
    if (posix_memalign(&p, 64, (size_t)bytes)) return NULL;
    return memset(p, 0, (size_t)bytes);
}

static long larger(long a, long b) { return a > b ? a : b; }

/* Divides the rows of a kernel into blocks that fit in registers. */
static void set_blocks(Layer *l) {
    int vecs = (l->kernel_w * l->in_c + 7) / 8;
    l->row_parts = (vecs + ACCUMULATORS - 1) / ACCUMULATORS;
    l->block_vecs = (vecs + l->row_parts - 1) / l->row_parts;
    int fit = ACCUMULATORS / l->block_vecs;
    int most = l->row_parts > 1 ? 1 : l->kernel_h == 5 && fit >= 5 ? 5 : smaller(3, fit);
    int blocks = (l->kernel_h + most - 1) / most;
    l->block_rows = (l->kernel_h + blocks - 1) / blocks;
    l->row_floats = l->row_parts * l->block_vecs * 8;
    l->exact = l->row_floats == l->kernel_w * l->inputs;
}

static int choose_way(const Layer *l, int batch) {
    int height = l->map_h * l->pool, width = l->map_w * l->pool;
    long weights = (long)l->outputs * l->kernel_h * l->kernel_w * l->inputs;
    if (weights > LARGE && (long)batch * height * width <= 320 && l->inputs % 8 == 0) return DOTS;
    int small = l->kernel_h == 3 && l->kernel_w == 3 && height % 2 == 0 && width % 2 == 0;
    return small && l->inputs >= 8 && l->in_c % 8 == 0 ? WINOGRAD : DIRECT;
}

/* Buffers and constants of a convolution; updates the sizes of buffers shared by all layers for `fdm_create`. */
static int make_convolution(Chain *chain, int i, const int32_t *spec, long *scratch, long *lists, long *counts,
                            long *windows_most) {
    Layer *l = chain->layer + i, *before = i ? l - 1 : NULL;
    int batch = chain->batch, pad_h = spec[5], pad_w = spec[6];
    l->kernel_h = spec[3], l->kernel_w = spec[4], l->pool = spec[7];
    l->in_c = before ? before->map_c : l->inputs;
    l->in_h = (before ? before->map_h : chain->height) + 2 * pad_h;
    l->in_w = (before ? before->map_w : chain->width) + 2 * pad_w;
    l->map_h = (l->in_h - l->kernel_h + 1) / l->pool, l->map_w = (l->in_w - l->kernel_w + 1) / l->pool;
    l->map_c = whole_lanes(l->outputs);
    set_blocks(l);
    l->way = spec[9] < 0 ? choose_way(l, batch) : spec[9];
    long input = sizeof(float) * ((long)batch * l->in_h * l->in_w * l->in_c + l->row_floats);
    long windows = (long)l->map_h * l->map_w, size = (long)l->kernel_h * l->row_floats * l->outputs;
    l->in = zeros(input);
    if (before) {
        l->in_grad = zeros(input);
        before->out = l->in, before->out_grad = l->in_grad;
        before->out_h = l->in_h, before->out_w = l->in_w, before->out_border_h = pad_h, before->out_border_w = pad_w;
    }
    l->rows = zeros(l->exact ? 0 : sizeof(float) * size);
    l->rows_grad = zeros(l->exact ? 0 : sizeof(float) * size);
    l->argmax = zeros((long)batch * windows * l->map_c + 64);
    long factor = l->way == WINOGRAD ? 16 : l->way == DIRECT ? (long)l->kernel_h * l->kernel_w : 0;
    l->packed = zeros(sizeof(float) * factor * l->inputs * l->map_c);
    l->padded_bias = zeros(sizeof(float) * l->map_c);
    /* large kernels: all images for each block of rows, whose part of the images should fit in the cache */
    int large = (long)sizeof(float) * size > LARGE;
    long image = sizeof(float) * l->in_h * l->in_w * (large ? 8 * l->block_vecs : l->in_c);
    long fitting = larger(1, (24L << 10) / image), enough = (64 + windows - 1) / windows;
    l->group = smaller(batch, (int)(large ? larger(fitting, (31 + windows) / windows) : fitting < enough ? fitting : enough));
    l->span = large ? batch : l->group;
    long groups = (l->span + l->group - 1) / l->group;

    int words = (l->outputs + 63) / 64, places = l->pool * l->pool;
    long back = l->map_c + l->span * windows * (l->map_c + 2L * places * words) + windows * places;
    long raw = (long)l->map_h * l->map_w * places * l->map_c * (l->way == DOTS ? batch : 0);
    *scratch = larger(*scratch, larger(back, raw));
    *scratch = larger(*scratch, larger(2L * l->map_w * l->pool * 16, 16L * TILE_ROWS * (l->in_c + 16)));
    *lists = larger(*lists, groups * (l->group * windows + 8) * l->outputs);
    *counts = larger(*counts, groups * l->outputs);
    *windows_most = larger(*windows_most, windows);
    return l->in && l->argmax && l->packed && l->padded_bias && l->rows_grad && l->rows && (!before || l->in_grad);
}

static int make_linear(Chain *chain, int i) {
    Layer *l = chain->layer + i, *before = l - 1;
    int batch = chain->batch;
    l->in_step = whole_lanes(l->inputs), l->out_step = whole_lanes(l->outputs);
    l->in = zeros(sizeof(float) * (long)batch * l->in_step), l->in_grad = zeros(sizeof(float) * (long)batch * l->in_step);
    if (before->kind == LINEAR) before->out = l->in, before->out_grad = l->in_grad;
    return l->in && l->in_grad;
}

/* The output buffer of a layer whose output is not the input buffer of the next layer. */
static int make_output(Chain *chain, Layer *l) {
    long step = l->out_step;
    if (l->kind == CONVOLUTION) {
        step = (long)l->map_h * l->map_w * l->map_c;
        l->out_h = l->map_h, l->out_w = l->map_w;
    }
    l->out = zeros(sizeof(float) * chain->batch * step), l->out_grad = zeros(sizeof(float) * chain->batch * step);
    return l->out && l->out_grad;
}

EXPORT void fdm_destroy(Chain *chain) {
    if (!chain) return;
    for (int i = 0; i < chain->layers; i++) {
        Layer *l = chain->layer + i, *next = i + 1 < chain->layers ? l + 1 : NULL;
        if (!next || l->kind != next->kind) { /* needs its own output buffer */
            free(l->out), free(l->out_grad), free(l->out_tangent), free(l->out_grad_tangent);
        }
        void *own[] = {l->in,         l->in_grad,         l->argmax,       l->packed,     l->padded_bias,
                       l->rows,       l->rows_grad,       l->in_tangent,   l->in_grad_tangent,
                       l->tangent_rows, l->live_patch,    l->live_place,   l->live_start};
        for (size_t k = 0; k < sizeof own / sizeof *own; k++) free(own[k]);
    }
    free(chain->scratch), free(chain->live), free(chain->patch), free(chain->live_count);
    free(chain->window_in), free(chain->window_out), free(chain->no_bias), free(chain->spare);
    free(chain);
}

/* A chain for batches of at most `batch` images, of which it reads the first `height` rows and `width` columns.
 *
 * `spec` has ten numbers per layer: kind (0 convolution, 1 linear), inputs, outputs, kernel height and width,
 * padding height and width, pool (1 or 2), relu (0 or 1), algorithm (-1: automatic). The first layer is a
 * convolution, linear layers come last. Python checks the arguments. NULL if out of memory. */
EXPORT Chain *fdm_create(int layers, const int32_t *spec, int batch, int height, int width) {
    Chain *chain = zeros(sizeof(Chain));
    if (!chain) return NULL;
    long scratch = 0, lists = 0, counts = 0, windows = 0;
    int made = 1;
    chain->layers = layers, chain->batch = batch, chain->height = height, chain->width = width, chain->channels = spec[1];
    for (int i = 0; i < layers; i++, spec += SPEC) {
        Layer *l = chain->layer + i;
        l->kind = spec[0], l->inputs = spec[1], l->outputs = spec[2], l->relu = spec[8];
        long weights = l->kind == CONVOLUTION ? (long)spec[3] * spec[4] * l->inputs * l->outputs : (long)l->inputs * l->outputs;
        l->weight = chain->parameters, l->bias = l->weight + weights;
        chain->parameters = l->bias + l->outputs;
        made = made && (l->kind == CONVOLUTION ? make_convolution(chain, i, spec, &scratch, &lists, &counts, &windows) : make_linear(chain, i));
    }
    for (int i = 0; i < layers; i++) {
        Layer *l = chain->layer + i;
        if (i + 1 == layers || l->kind != l[1].kind) made = made && make_output(chain, l);
    }
    const Layer *last = chain->layer + layers - 1;
    chain->outputs = last->kind == LINEAR ? last->outputs : last->outputs * last->map_h * last->map_w;
    chain->scratch = zeros(sizeof(float) * (scratch + 64));
    chain->live = zeros(sizeof(float) * (lists + 8)), chain->patch = zeros(sizeof(int32_t) * (lists + 8));
    chain->live_count = zeros(sizeof(int32_t) * counts);
    chain->window_in = zeros(sizeof(int32_t) * (windows + 8)), chain->window_out = zeros(sizeof(int32_t) * (windows + 8));
    for (int bits = 0; bits < 256; bits++) {
        chain->unit[bits] = (float)bits / 255.0f;
        for (int j = 0, to = 0; j < 8; j++)
            if (bits >> j & 1) chain->order[bits][to++] = (uint8_t)j;
    }
    if (made && chain->scratch && chain->live && chain->patch && chain->live_count && chain->window_in && chain->window_out)
        return chain;
    fdm_destroy(chain);
    return NULL;
}

static void forward(const Chain *chain, int count, const float *parameters) {
    for (int i = 0; i < chain->layers; i++) {
        const Layer *l = chain->layer + i;
        if (l->kind == CONVOLUTION) {
            convolution_forward(chain, l, count, parameters);
            continue;
        }
        if (l[-1].kind == CONVOLUTION) flatten(l - 1, l, count, l[-1].out, l->in);
        linear_forward(l, count, parameters + l->weight, parameters + l->bias, l->in, l->out, l->relu);
    }
}

static void backward(Chain *chain, int count, const float *parameters, float *grads) {
    for (int i = chain->layers - 1; i >= 0; i--) {
        Layer *l = chain->layer + i;
        const float *weight = parameters + l->weight;
        if (l->kind == CONVOLUTION) {
            convolution_backward(chain, l, count, l->out_grad, l->in, weight, grads + l->weight, grads + l->bias,
                                 l->in_grad, 0);
            continue;
        }
        relu_backward(l, count, l->out_grad);
        linear_weight_grad(l, count, l->out_grad, l->in, grads + l->weight, 0);
        linear_bias_grad(l, count, l->out_grad, grads + l->bias);
        linear_in_grad(l, count, l->out_grad, weight, l->in_grad);
        if (l[-1].kind == CONVOLUTION) unflatten(l - 1, l, count, l->in_grad, l[-1].out_grad);
    }
}

/* The outputs of the chain: logits [count][classes], or [count][channels][places] if it ends in a convolution. */
static void copy_outputs(const Chain *chain, int count, float *to) {
    const Layer *last = chain->layer + chain->layers - 1;
    for (int i = 0; i < count; i++, to += chain->outputs)
        if (last->kind == LINEAR)
            memcpy(to, last->out + (long)i * last->out_step, sizeof(float) * (size_t)last->outputs);
        else {
            int places = last->map_h * last->map_w;
            transpose_block(last->out + (long)i * places * last->map_c, places, last->outputs, last->map_c, to, places);
        }
}

/* The gradient of the mean cross-entropy of a batch (of `scale` · the sum, if that is not 0), where `shift` is added to the
 * outputs unless it is NULL; returns the summed loss. */
EXPORT double fdm_gradients(Chain *chain, int count, const uint8_t *images, int height, int width, const int64_t *index,
                            const int32_t *crop, const int64_t *labels, const float *shift, float scale,
                            const float *parameters, float *grads) {
    read_images(chain, count, images, height, width, index, crop);
    pack_forward(chain, parameters);
    forward(chain, count, parameters);
    const Layer *last = chain->layer + chain->layers - 1;
    double loss = cross_entropy(last, count, labels, shift, scale ? scale : 1.0f / (float)count);
    backward(chain, count, parameters, grads);
    return loss;
}

/* The outputs for any number of images; activations of the last batch are kept for `fdm_backward`. */
EXPORT void fdm_outputs(Chain *chain, int count, const uint8_t *images, int height, int width, const int64_t *index,
                        const int32_t *crop, const float *parameters, float *outputs) {
    pack_forward(chain, parameters);
    for (int at = 0; at < count; at += chain->batch) {
        int some = smaller(chain->batch, count - at);
        read_images(chain, some, images, height, width, index + at, crop ? crop + 3L * at : NULL);
        forward(chain, some, parameters);
        copy_outputs(chain, some, outputs + (long)at * chain->outputs);
    }
}

/* The gradient of any loss, given its gradient with respect to the outputs of the last forward pass. */
EXPORT void fdm_backward(Chain *chain, int count, const float *output_grads, const float *parameters, float *grads) {
    Layer *last = chain->layer + chain->layers - 1;
    for (int i = 0; i < count; i++)
        memcpy(last->out_grad + (long)i * last->out_step, output_grads + (long)i * last->outputs,
               sizeof(float) * (size_t)last->outputs);
    backward(chain, count, parameters, grads);
}

/* Changes with the interface, so that a library built from other sources is not used. */
EXPORT int fdm_version(void) { return 2; }

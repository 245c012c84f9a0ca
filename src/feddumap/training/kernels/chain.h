/* A chain of layers: convolutions with their pools and ReLUs, then linear layers.
 *
 * Activations are stored as [image][row][column][channel]. A convolution's input buffer has its zero padding
 * as a border, and channels are rounded up to whole vectors, except for the images themselves; padding is
 * zero. Weights are read from one flat array in the order of the layers, weight before bias: convolutions as
 * [output][kernel row][kernel column][input], linear layers as [output][input].
 *
 * Nothing is allocated after `fdm_create`.
 */
#ifndef FEDDUMAP_CHAIN_H
#define FEDDUMAP_CHAIN_H

#include "vec.h"

#define MOST_LAYERS 32
#define ACCUMULATORS 12 /* registers for sums, of 16 */
#define TILE_ROWS 24    /* tiles of a Winograd block, at most */

enum { CONVOLUTION = 0, LINEAR = 1 };
enum { DIRECT = 0, WINOGRAD = 1, DOTS = 2 }; /* algorithms of a convolution */

typedef struct {
    int kind, inputs, outputs; /* channels or features */
    int relu;
    long weight, bias;         /* offsets in the flat array */
    float *in, *out;           /* activations; `out` is the next layer's `in` */
    float *in_grad, *out_grad; /* their gradients, in the same geometry */

    /* linear layers: floats between two samples */
    int in_step, out_step;

    /* convolutions, stride 1 */
    int kernel_h, kernel_w, pool; /* pool: 1 (none) or 2 */
    int way;
    int in_h, in_w, in_c;                         /* the input buffer: sizes with the border, floats a pixel */
    int map_h, map_w, map_c;                      /* the output after the pool, channels rounded up */
    int out_h, out_w, out_border_h, out_border_w; /* the output buffer, and where the map begins in it */
    uint8_t *argmax;                              /* which of a window's four outputs is the maximum */
    float *packed;                                /* weights for the forward pass */
    float *padded_bias;

    /* Gradients take a kernel's rows in blocks of `block_rows` rows of `block_vecs` vectors: as many as stay in
     * registers. A row of kernel_w · in_c floats has `row_parts` such parts, `row_floats` in all. If `exact`, rows
     * and parts need no padding, and weights and gradients are used where they are. */
    int block_rows, block_vecs, row_parts, row_floats, exact;
    float *rows;      /* weights in blocks: [block][output][row][block_vecs] */
    float *rows_grad; /* [output][kernel row][row_floats] */
    int group, span;  /* images whose gradients are listed together, and that a block is applied to at once */

    /* Hessian products: derivatives along a direction, of activations and of their gradients */
    float *in_tangent, *out_tangent, *in_grad_tangent, *out_grad_tangent;
    float *tangent_rows;                           /* the direction's weights, in blocks like `rows` */
    int32_t *live_patch, *live_place, *live_start; /* by image and channel, the live outputs */
} Layer;

typedef struct {
    int layers, batch;
    int height, width, channels; /* of the part of an image that the chain depends on */
    long parameters;
    int outputs; /* outputs per image */
    Layer layer[MOST_LAYERS];
    float *scratch;
    /* the gradients that are not zero, for each channel in turn: value, place of the patch it belongs to */
    float *live;
    int32_t *patch;
    int32_t *live_count;
    int32_t *window_in, *window_out; /* place of each pool window in the input and in the output */
    uint8_t order[256][8];           /* the places of the bits of a byte */
    float unit[256];                 /* bytes as numbers in [0, 1] */
    float *no_bias, *spare;          /* Hessian products: zeros, and numbers of a linear layer */
} Chain;

/* pack.c */
void pack_forward(const Chain *chain, const float *parameters);
void pack_rows(const Layer *layer, const float *weight, float *rows);
void unpack_rows(const Layer *layer, float *weight_grad);
void transpose_block(const float *from, int rows, int columns, long from_step, float *to, long to_step);

/* input.c */
void read_images(const Chain *chain, int count, const uint8_t *images, int height, int width, const int64_t *index,
                 const int32_t *crop);

/* convolution.c, sparse.c */
void convolution_forward(const Chain *chain, const Layer *layer, int count, const float *parameters);
void convolution_backward(Chain *chain, const Layer *layer, int count, const float *out_grad, const float *in,
                          const float *weight, float *weight_grad, float *bias_grad, float *in_grad, int add);
void project_patches(const Layer *layer, int channel, const int32_t *patch, int count, const float *x, const float *weight,
                     const float *packed, float *sums);

/* linear.c */
void flatten(const Layer *convolution, const Layer *linear, int count, const float *from, float *to);
void unflatten(const Layer *convolution, const Layer *linear, int count, const float *from, float *to);
void linear_forward(const Layer *layer, int count, const float *weight, const float *bias, const float *in, float *out,
                    int with_relu);
void relu_backward(const Layer *layer, int count, float *grad);
void linear_weight_grad(const Layer *layer, int count, const float *grad, const float *in, float *weight_grad, int add);
void linear_bias_grad(const Layer *layer, int count, const float *grad, float *bias_grad);
void linear_in_grad(const Layer *layer, int count, const float *grad, const float *weight, float *in_grad);

/* loss.c */
double cross_entropy(const Layer *last, int count, const int64_t *labels, const float *shift, float scale);
void cross_entropy_tangent(const Layer *last, int count, float scale, float *scratch);

/* chain.c */
void *zeros(long bytes);

INLINE float *in_map(const Layer *l, float *buffer, int image, int row, int column) {
    return buffer + (((long)image * l->out_h + row + l->out_border_h) * l->out_w + column + l->out_border_w) * l->map_c;
}

#endif

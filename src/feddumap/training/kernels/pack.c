/* Packs weights in the layouts that the kernels read. */
#include <string.h>

#include "chain.h"

/* to[column][row] = from[row][column] */
void transpose_block(const float *from, int rows, int columns, long from_step, float *to, long to_step) {
    int r = 0;
    for (; r + 8 <= rows; r += 8) {
        int c = 0;
        for (; c + 8 <= columns; c += 8) {
            vec b[8];
            UNROLL for (int i = 0; i < 8; i++) b[i] = load(from + (r + i) * from_step + c);
            transpose(b);
            UNROLL for (int i = 0; i < 8; i++) store(to + (c + i) * to_step + r, b[i]);
        }
        for (; c < columns; c++)
            for (int i = r; i < r + 8; i++) to[c * to_step + i] = from[i * from_step + c];
    }
    for (; r < rows; r++)
        for (int c = 0; c < columns; c++) to[c * to_step + r] = from[r * from_step + c];
}

/* [output][k] to [block of 16 outputs, the last may have 8][k][16 or 8], padded with zeros */
static void pack_direct(const Layer *l, const float *weight) {
    int size = l->kernel_h * l->kernel_w * l->inputs;
    for (int c = 0; c < l->map_c; c += 8) {
        int first = c & ~15, step = l->map_c - first >= 16 ? 16 : 8, have = smaller(8, l->outputs - c), k = 0;
        float *to = l->packed + (long)first * size + (c - first);
        const float *from = weight + (long)c * size;
        for (; have == 8 && k + 8 <= size; k += 8) {
            vec b[8];
            UNROLL for (int i = 0; i < 8; i++) b[i] = load(from + (long)i * size + k);
            transpose(b);
            UNROLL for (int i = 0; i < 8; i++) store(to + (long)(k + i) * step, b[i]);
        }
        for (; k < size; k++)
            for (int i = 0; i < 8; i++) to[(long)k * step + i] = i < have ? from[(long)i * size + k] : 0;
    }
}

/* Winograd's G g Gᵀ of every 3×3 filter: [block of outputs][16 places][input][16 or 8] */
static void pack_winograd(const Layer *l, const float *weight) {
    int inputs = l->inputs;
    vec half = splat(0.5f);
    for (int c = 0; c < l->map_c; c += 8) {
        int first = c & ~15, step = l->map_c - first >= 16 ? 16 : 8, have = smaller(8, l->outputs - c);
        float *to = l->packed + 16L * first * inputs + (c - first);
        const float *from = weight + (long)c * 9 * inputs;
        for (int k = 0; k < inputs; k += 8) {
            vec g[9][8]; /* [place][input], a lane for each output */
            int some = smaller(8, inputs - k);
            UNROLL for (int q = 0; q < 9; q++) {
                if (have == 8 && some == 8)
                    for (int i = 0; i < 8; i++) g[q][i] = load(from + ((long)i * 9 + q) * inputs + k);
                else
                    for (int i = 0; i < 8; i++)
                        for (int j = 0; j < 8; j++)
                            g[q][i][j] = i < have && j < some ? from[((long)i * 9 + q) * inputs + k + j] : 0;
                transpose(g[q]);
            }
            for (int j = 0; j < some; j++) {
                vec s[4][3];
                UNROLL for (int b = 0; b < 3; b++) {
                    vec outer = (g[b][j] + g[6 + b][j]) * half, middle = g[3 + b][j] * half;
                    s[0][b] = g[b][j], s[1][b] = outer + middle, s[2][b] = outer - middle, s[3][b] = g[6 + b][j];
                }
                UNROLL for (int a = 0; a < 4; a++) {
                    vec outer = (s[a][0] + s[a][2]) * half, middle = s[a][1] * half;
                    float *place = to + (long)(a * 4 * inputs + k + j) * step;
                    long next = (long)inputs * step;
                    store(place, s[a][0]);
                    store(place + next, outer + middle);
                    store(place + 2 * next, outer - middle);
                    store(place + 3 * next, s[a][2]);
                }
            }
        }
    }
}

/* Packs the weights of every convolution for the forward pass. */
void pack_forward(const Chain *chain, const float *parameters) {
    for (int i = 0; i < chain->layers; i++) {
        const Layer *l = chain->layer + i;
        if (l->kind != CONVOLUTION) continue;
        memcpy(l->padded_bias, parameters + l->bias, sizeof(float) * (size_t)l->outputs);
        if (l->way == DIRECT) pack_direct(l, parameters + l->weight);
        if (l->way == WINOGRAD) pack_winograd(l, parameters + l->weight);
    }
}

/* The rows of the kernels in blocks, for gradients with respect to the input; the padding is zero from the start. */
void pack_rows(const Layer *l, const float *weight, float *rows) {
    int part = 8 * l->block_vecs, size = l->kernel_w * l->inputs;
    for (int y = 0; y < l->kernel_h; y += l->block_rows)
        for (int p = 0; p < l->row_parts; p++)
            for (int c = 0; c < l->outputs; c++)
                for (int r = y; r < smaller(y + l->block_rows, l->kernel_h); r++, rows += part) {
                    const float *from = weight + ((long)c * l->kernel_h + r) * size;
                    int begin = p * part;
                    if (l->in_c == l->inputs) {
                        int some = smaller(part, size - begin);
                        if (some > 0) memcpy(rows, from + begin, sizeof(float) * (size_t)some);
                        continue;
                    }
                    for (int x = 0; x < l->kernel_w; x++) { /* the channels of a column are padded */
                        int at = x * l->in_c - begin, skip = at < 0 ? -at : 0, upto = smaller(l->inputs, part - at);
                        if (skip < upto)
                            memcpy(rows + at + skip, from + x * l->inputs + skip, sizeof(float) * (size_t)(upto - skip));
                    }
                }
}

/* The gradient of the weights, without the padding. */
void unpack_rows(const Layer *l, float *weight_grad) {
    int size = l->kernel_w * l->inputs;
    for (long row = 0; row < (long)l->outputs * l->kernel_h; row++) {
        const float *from = l->rows_grad + row * l->row_floats;
        float *to = weight_grad + row * size;
        if (l->in_c == l->inputs)
            memcpy(to, from, sizeof(float) * (size_t)size);
        else
            for (int x = 0; x < l->kernel_w; x++)
                memcpy(to + x * l->inputs, from + x * l->in_c, sizeof(float) * (size_t)l->inputs);
    }
}

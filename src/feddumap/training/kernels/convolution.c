/* Forward pass of convolutions with bias, 2×2 max-pool and ReLU, fused: the output before the pool is not stored. */
#include "chain.h"

/* ROWS neighbouring pixels times VECS vectors of output channels: bias + Σ x·w, where the inputs of a pixel are
 * `runs` runs of `length` floats, at the byte offsets `run`. `step`: bytes between two pixels. */
INLINE void tile(const int ROWS, const int VECS, const char *x, long step, const int32_t *run, int runs,
                 const int length, const float *w, const float *bias, float *out, long out_step) {
    vec acc[14][2];
    UNROLL for (int i = 0; i < ROWS; i++) UNROLL for (int v = 0; v < VECS; v++)
        acc[i][v] = bias ? load(bias + 8 * v) : splat(0);
    for (int r = 0; r < runs; r++) {
        const char *p[5]; /* one pointer for three pixels: an address is a pointer and a multiple of `step` */
        UNROLL for (int i = 0; i < 5; i++) p[i] = x + run[r] + 3 * i * step;
        for (int k = 0; k < length; k++) {
            vec weight[2];
            UNROLL for (int v = 0; v < VECS; v++) weight[v] = load(w + 8 * v);
            w += 8 * VECS;
            UNROLL for (int i = 0; i < ROWS; i++) {
                vec pixel = splat(*(const float *)(p[i / 3] + (i % 3) * step));
                UNROLL for (int v = 0; v < VECS; v++) acc[i][v] += pixel * weight[v];
            }
            UNROLL for (int i = 0; i < 5; i++) p[i] += sizeof(float);
        }
    }
    UNROLL for (int i = 0; i < ROWS; i++) UNROLL for (int v = 0; v < VECS; v++)
        store(out + i * out_step + 8 * v, acc[i][v]);
}

typedef void Tiles(int, const char *, long, const int32_t *, int, int, const float *, const float *, float *, long);
#define CASE(ROWS, VECS, LENGTH) \
    case ROWS: tile(ROWS, VECS, x, step, run, runs, LENGTH, w, bias, out, out_step); break;
#define UPTO_6(VECS, L) CASE(1, VECS, L) CASE(2, VECS, L) CASE(3, VECS, L) CASE(4, VECS, L) CASE(5, VECS, L) CASE(6, VECS, L)
#define UPTO_14(VECS, L) UPTO_6(VECS, L) CASE(7, VECS, L) CASE(8, VECS, L) CASE(9, VECS, L) CASE(10, VECS, L) \
    CASE(11, VECS, L) CASE(12, VECS, L) CASE(13, VECS, L) CASE(14, VECS, L)
#define TILES(NAME, CASES, VECS, LENGTH) \
    static void NAME(int rows, const char *x, long step, const int32_t *run, int runs, int length, const float *w, \
                     const float *bias, float *out, long out_step) { \
        (void)length; \
        switch (rows) { CASES(VECS, LENGTH) } \
    }
TILES(tiles_8, UPTO_14, 1, length)
TILES(tiles_16, UPTO_6, 2, length)
TILES(tiles_8_of_9, UPTO_14, 1, 9) /* first layers: 3 channels, kernels 3 or 5 wide */
TILES(tiles_16_of_9, UPTO_6, 2, 9)
TILES(tiles_8_of_15, UPTO_14, 1, 15)

static Tiles *tiles_for(int vecs, int length) {
    if (length == 9) return vecs == 2 ? tiles_16_of_9 : tiles_8_of_9;
    if (length == 15 && vecs == 1) return tiles_8_of_15;
    return vecs == 2 ? tiles_16 : tiles_8;
}

/* `count` neighbouring pixels, in tiles of about equal size */
INLINE void strip(Tiles *tiles, int vecs, int count, const float *x, long step, const int32_t *run, int runs,
                  int length, const float *w, const float *bias, float *out, long out_step) {
    int most = vecs == 2 ? 6 : 14, parts = (count + most - 1) / most;
    for (int i = 0, at = 0; i < parts; i++) {
        int rows = (count - at + parts - i - 1) / (parts - i);
        tiles(rows, (const char *)(x + at * step), 4 * step, run, runs, length, w, bias, out + at * out_step, out_step);
        at += rows;
    }
}

/* The first maximum of a window's four outputs, as in torch (NaN is the maximum), then ReLU. */
INLINE void pool_window(vec a, vec b, vec c, vec d, int with_relu, float *out, uint8_t *argmax) {
    vec most = a;
    ivec at = {0}, one = {1, 1, 1, 1, 1, 1, 1, 1}, more;
    more = (b > most) | (b != b);
    most = pick(more, b, most), at = more & one;
    more = (c > most) | (c != c);
    most = pick(more, c, most), at = iselect(more, one * 2, at);
    more = (d > most) | (d != d);
    most = pick(more, d, most), at = iselect(more, one * 3, at);
    store(out, with_relu ? relu(most) : most);
    *(bvec_at *)argmax = __builtin_convertvector(at, bvec);
}

/* A row of the map from one or two rows `raw` of outputs [column][step] before the pool. */
static void finish_row(const Layer *l, const float *raw, int step, int image, int row, int channel, int vecs) {
    float *out = in_map(l, l->out, image, row, 0) + channel;
    uint8_t *argmax = l->argmax + (((long)image * l->map_h + row) * l->map_w) * l->map_c + channel;
    long below = (long)l->map_w * 2 * step;
    for (int x = 0; x < l->map_w; x++, out += l->map_c, argmax += l->map_c)
        for (int v = 0; v < 8 * vecs; v += 8) {
            const float *from = raw + (long)x * l->pool * step + v;
            if (l->pool == 2)
                pool_window(load(from), load(from + step), load(from + below), load(from + below + step), l->relu,
                            out + v, argmax + v);
            else
                store(out + v, l->relu ? relu(load(from)) : load(from));
        }
}

static void direct(const Chain *chain, const Layer *l, int count) {
    int32_t run[256];
    int joined = l->in_c == l->inputs; /* then a row of a patch is one run */
    int runs = 0, length = joined ? l->kernel_w * l->inputs : l->inputs;
    for (int y = 0; y < l->kernel_h; y++)
        for (int x = 0; x < (joined ? 1 : l->kernel_w); x++) run[runs++] = 4 * (y * l->in_w + x) * l->in_c;
    int size = l->kernel_h * l->kernel_w * l->inputs, width = l->map_w * l->pool;
    for (int c = 0; c < l->map_c; c += 16) {
        int vecs = l->map_c - c >= 16 ? 2 : 1;
        Tiles *tiles = tiles_for(vecs, length);
        for (int i = 0; i < count; i++)
            for (int y = 0; y < l->map_h; y++) {
                for (int dy = 0; dy < l->pool; dy++) {
                    const float *x = l->in + ((long)i * l->in_h + y * l->pool + dy) * l->in_w * l->in_c;
                    strip(tiles, vecs, width, x, l->in_c, run, runs, length, l->packed + (long)c * size,
                          l->padded_bias + c, chain->scratch + (long)dy * width * 8 * vecs, 8 * vecs);
                }
                finish_row(l, chain->scratch, 8 * vecs, i, y, c, vecs);
            }
    }
}

/* Winograd's F(2×2, 3×3): sixteen products for four outputs, which are a pool's window. */
INLINE void winograd_input(const float *from, long row, int step, float *to, long place) {
    vec d[4][4], e[4][4];
    UNROLL for (int a = 0; a < 4; a++) UNROLL for (int b = 0; b < 4; b++) d[a][b] = load(from + a * row + b * step);
    UNROLL for (int b = 0; b < 4; b++) {
        e[0][b] = d[0][b] - d[2][b];
        e[1][b] = d[1][b] + d[2][b];
        e[2][b] = d[2][b] - d[1][b];
        e[3][b] = d[1][b] - d[3][b];
    }
    UNROLL for (int a = 0; a < 4; a++, to += 4 * place) {
        store(to, e[a][0] - e[a][2]);
        store(to + place, e[a][1] + e[a][2]);
        store(to + 2 * place, e[a][2] - e[a][1]);
        store(to + 3 * place, e[a][1] - e[a][3]);
    }
}

INLINE void winograd_output(const float *m, long place, vec bias, vec out[2][2]) {
    vec s[2][4];
    UNROLL for (int b = 0; b < 4; b++) {
        vec m0 = load(m + b * place), m1 = load(m + (4 + b) * place), m2 = load(m + (8 + b) * place);
        s[0][b] = m0 + m1 + m2;
        s[1][b] = m1 - m2 - load(m + (12 + b) * place);
    }
    UNROLL for (int a = 0; a < 2; a++) {
        out[a][0] = s[a][0] + s[a][1] + s[a][2] + bias;
        out[a][1] = s[a][1] - s[a][2] - s[a][3] + bias;
    }
}

static void winograd(const Chain *chain, const Layer *l, int count) {
    int tiles_h = l->map_h * l->pool / 2, tiles_w = l->map_w * l->pool / 2, all = count * tiles_h * tiles_w;
    int depth = l->in_c;
    int block = smaller(TILE_ROWS, depth <= 64 ? 12 : 24);
    float *inputs = chain->scratch, *products = inputs + 16L * block * depth;
    long place = (long)block * depth, product_place = block * 16;
    int32_t run[1] = {0};
    for (int first = 0; first < all; first += block) {
        int some = smaller(block, all - first);
        for (int t = 0; t < some; t++) {
            int at = first + t, image = at / (tiles_h * tiles_w), y = at / tiles_w % tiles_h, x = at % tiles_w;
            const float *from = l->in + (((long)image * l->in_h + 2 * y) * l->in_w + 2 * x) * depth;
            for (int c = 0; c < depth; c += 8)
                winograd_input(from + c, (long)l->in_w * depth, depth, inputs + (long)t * depth + c, place);
        }
        for (int c = 0; c < l->map_c; c += 16) {
            int vecs = l->map_c - c >= 16 ? 2 : 1;
            const float *w = l->packed + 16L * c * l->inputs;
            for (int q = 0; q < 16; q++)
                strip(vecs == 2 ? tiles_16 : tiles_8, vecs, some, inputs + q * place, depth, run, 1, l->inputs,
                      w + (long)q * l->inputs * 8 * vecs, 0, products + q * product_place, 16);
            for (int t = 0; t < some; t++) {
                int at = first + t, image = at / (tiles_h * tiles_w), y = at / tiles_w % tiles_h, x = at % tiles_w;
                for (int v = c; v < c + 8 * vecs; v += 8) {
                    vec o[2][2];
                    winograd_output(products + t * 16 + (v - c), product_place, load(l->padded_bias + v), o);
                    if (l->pool == 2)
                        pool_window(o[0][0], o[0][1], o[1][0], o[1][1], l->relu, in_map(l, l->out, image, y, x) + v,
                                    l->argmax + (((long)image * l->map_h + y) * l->map_w + x) * l->map_c + v);
                    else
                        UNROLL for (int a = 0; a < 4; a++)
                            store(in_map(l, l->out, image, 2 * y + a / 2, 2 * x + a % 2) + v,
                                  l->relu ? relu(o[a / 2][a % 2]) : o[a / 2][a % 2]);
                }
            }
        }
    }
}

/* PIXELS patches times FILTERS filters as dot products with unpacked weights: for maps so small that packing the
 * weights would take as long as the products. */
INLINE void patch_dots(const int PIXELS, const int FILTERS, const float *const *x, long x_row, const float *w, long filter,
                       int rows, int length, float *out, long out_step) {
    vec acc[4][3];
    UNROLL for (int i = 0; i < PIXELS; i++) UNROLL for (int f = 0; f < FILTERS; f++) acc[i][f] = splat(0);
    for (int r = 0; r < rows; r++, w += length)
        for (int k = 0; k < length; k += 8) {
            vec weight[3];
            UNROLL for (int f = 0; f < FILTERS; f++) weight[f] = load(w + f * filter + k);
            UNROLL for (int i = 0; i < PIXELS; i++) {
                vec pixel = load(x[i] + r * x_row + k);
                UNROLL for (int f = 0; f < FILTERS; f++) acc[i][f] += pixel * weight[f];
            }
        }
    UNROLL for (int i = 0; i < PIXELS; i++) UNROLL for (int f = 0; f < FILTERS; f++)
        out[i * out_step + f] = sum(acc[i][f]);
}

static void dots(const Chain *chain, const Layer *l, int count, const float *weight) {
    int width = l->map_w * l->pool, height = l->map_h * l->pool, length = l->kernel_w * l->in_c;
    long filter = (long)l->kernel_h * length;
    float *raw = chain->scratch; /* [image][row][column][channel] */
    int pixels = count * height * width;
    for (int c = 0; c < l->outputs; c += 3)
        for (int p = 0; p < pixels; p += 4) {
            const float *x[4];
            int some = smaller(4, pixels - p), filters = smaller(3, l->outputs - c);
            for (int i = 0; i < 4; i++) {
                int at = smaller(p + i, pixels - 1), image = at / (height * width), y = at / width % height;
                x[i] = l->in + (((long)image * l->in_h + y) * l->in_w + at % width) * l->in_c;
            }
            float *out = raw + (long)p * l->map_c + c;
            const float *w = weight + c * filter;
            long row = (long)l->in_w * l->in_c;
            float spare[4 * 3];
            if (some == 4 && filters == 3)
                patch_dots(4, 3, x, row, w, filter, l->kernel_h, length, out, l->map_c);
            else
                for (int f = 0; f < filters; f++) {
                    patch_dots(4, 1, x, row, w + f * filter, filter, l->kernel_h, length, spare, 3);
                    for (int i = 0; i < some; i++) out[(long)i * l->map_c + f] = spare[3 * i];
                }
        }
    for (long p = 0; p < pixels; p++)
        for (int c = 0; c < l->map_c; c += 8) {
            vec value = load(raw + p * l->map_c + c) + load(l->padded_bias + c);
            if (c + 8 > l->outputs)
                for (int j = smaller(8, l->outputs - c); j < 8; j++) value[j] = 0;
            store(raw + p * l->map_c + c, value);
        }
    for (int i = 0; i < count; i++)
        for (int y = 0; y < l->map_h; y++)
            finish_row(l, raw + ((long)i * height + y * l->pool) * width * l->map_c, l->map_c, i, y, 0, l->map_c / 8);
}

void convolution_forward(const Chain *chain, const Layer *l, int count, const float *parameters) {
    if (l->way == WINOGRAD)
        winograd(chain, l, count);
    else if (l->way == DOTS)
        dots(chain, l, count, parameters + l->weight);
    else
        direct(chain, l, count);
}

/* Writes images to the input buffer of the first layer: cropped, mirrored and scaled to [0, 1]. */
#include "chain.h"

static void read_row(float *to, const uint8_t *from, long count) {
    for (long j = 0; j < count; j++) to[j] = (float)from[j] / 255.0f; /* exactly as torch divides */
}

/* `count` pixels leftwards from `from` */
INLINE void read_mirrored(const int C, float *to, const uint8_t *from, int count, const float *unit) {
    for (int x = 0; x < count; x++, from -= C, to += C)
        for (int c = 0; c < C; c++) to[c] = unit[from[c]];
}

/* `count` images of [height][width][channels] bytes, chosen by `index`. With `crop` (top, left and mirror for
 * each), pixel (y, x) is that at (y + top, x' + left) of the original, 0 outside, where x' is x or, mirrored,
 * width − 1 − x. Only the part that the chain depends on is read. */
void read_images(const Chain *chain, int count, const uint8_t *images, int height, int width,
                 const int64_t *index, const int32_t *crop) {
    const Layer *first = chain->layer;
    int channels = chain->channels;
    int border_h = (first->in_h - chain->height) / 2, border_w = (first->in_w - chain->width) / 2;
    long row_step = (long)first->in_w * channels, image_step = first->in_h * row_step;
    for (int i = 0; i < count; i++) {
        const uint8_t *image = images + index[i] * height * width * channels;
        int top = crop ? crop[3 * i] : 0, left = crop ? crop[3 * i + 1] : 0, mirror = crop ? crop[3 * i + 2] : 0;
        float *to = first->in + i * image_step + border_h * row_step + (long)border_w * channels;
        /* columns [begin, end) lie inside the original */
        int origin = mirror ? width - 1 + left : left, step = mirror ? -1 : 1;
        int begin = mirror ? origin - (width - 1) : -origin, end = mirror ? origin + 1 : width - origin;
        begin = begin < 0 ? 0 : smaller(begin, chain->width);
        end = end < begin ? begin : smaller(end, chain->width);
        for (int y = 0; y < chain->height; y++, to += row_step) {
            int row = y + top;
            int used = row >= 0 && row < height && end > begin;
            int from = used ? begin : 0, upto = used ? end : 0;
            for (long j = 0; j < (long)from * channels; j++) to[j] = 0;
            for (long j = (long)upto * channels; j < (long)chain->width * channels; j++) to[j] = 0;
            if (!used) continue;
            float *place = to + (long)begin * channels;
            const uint8_t *source = image + ((long)row * width + origin + step * begin) * channels;
            if (!mirror)
                read_row(place, source, (long)(end - begin) * channels);
            else if (channels == 3)
                read_mirrored(3, place, source, end - begin, chain->unit);
            else
                read_mirrored(channels, place, source, end - begin, chain->unit);
        }
    }
}

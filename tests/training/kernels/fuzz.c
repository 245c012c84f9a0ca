/* Random chains through everything that the kernels export, for AddressSanitizer and UndefinedBehaviorSanitizer.
 *
 *     fuzz SEED CHAINS
 *
 * Chain i is made from SEED + i alone. Each is described on stderr before it is run, so that the last line says what
 * to run again: `fuzz NUMBER 1`. Whatever Python gives to the kernels lies in a buffer of exactly its size, and only
 * such calls are made as `spec_of`, `Chain` and `Images` allow. Results are not compared: tests/test_kernels.py does.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct Chain Chain;
Chain *fdm_create(int layers, const int32_t *spec, int batch, int height, int width);
void fdm_destroy(Chain *chain);
double fdm_gradients(Chain *chain, int count, const uint8_t *images, int height, int width, const int64_t *index,
                     const int32_t *crop, const int64_t *labels, const float *shift, float scale, const float *parameters,
                     float *grads);
void fdm_outputs(Chain *chain, int count, const uint8_t *images, int height, int width, const int64_t *index,
                 const int32_t *crop, const float *parameters, float *outputs);
void fdm_backward(Chain *chain, int count, const float *output_grads, const float *parameters, float *grads);
int fdm_hessian_start(Chain *chain, int count);
void fdm_hessian_product(Chain *chain, int count, float scale, const float *parameters, const float *direction,
                         float *product);
int fdm_version(void);

#define SPEC 10
#define MOST 8
enum { PLAIN, WITH_NAN, WITH_INFINITY, HUGE_ONES, ZEROS, KINDS };
enum { AUTOMATIC = -1, DIRECT, WINOGRAD, DOTS };

typedef struct {
    int layers, batch, height, width, channels;
    int linear;      /* whether linear layers follow; feature maps otherwise */
    long parameters, outputs;
    int32_t spec[MOST][SPEC];
} Plan;

static uint64_t state;
static volatile double kept; /* results are looked at, so that nothing is left out */

static uint32_t draw(void) { /* splitmix64 */
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (uint32_t)((z ^ (z >> 31)) >> 32);
}

static int between(int low, int high) { return low + (int)(draw() % (uint32_t)(high - low + 1)); }
static int once_in(int times) { return between(1, times) == 1; }
static float uniform(void) { return (float)(draw() >> 8) / 8388608.0f - 1.0f; }

static void *exactly(size_t bytes) {
    void *p = malloc(bytes ? bytes : 1);
    if (!p) {
        fprintf(stderr, "fuzz: no memory\n");
        exit(2);
    }
    return p;
}

static float *floats(long count, int kind, float size) {
    float *p = exactly(sizeof(float) * (size_t)count);
    for (long i = 0; i < count; i++) {
        p[i] = kind == ZEROS ? 0 : size * uniform();
        if (kind == HUGE_ONES) p[i] *= 1e30f;
        if (kind == WITH_NAN && once_in(30)) p[i] = NAN;
        if (kind == WITH_INFINITY && once_in(30)) p[i] = draw() & 1 ? INFINITY : -INFINITY;
    }
    return p;
}

static float *unset(long count) { return exactly(sizeof(float) * (size_t)count); }

static void look(const float *p, long count) {
    double total = 0;
    for (long i = 0; i < count; i++) total += p[i];
    free((void *)p);
    kept = total;
}

/* A way of computing that `Chain._way` would let a layer have. */
static int way(int place, const int32_t *layer, int height, int width) {
    int chosen = between(AUTOMATIC, DOTS);
    if (chosen == WINOGRAD && !(layer[3] == 3 && layer[4] == 3 && height % 2 == 0 && width % 2 == 0 && place > 0))
        return DIRECT;
    if (chosen == DOTS && layer[1] % 8) return DIRECT;
    return chosen;
}

/* As `Spec.fits` and `Chain._check_sizes` have it: 0 if the drawn layers do not go through. */
static int make_plan(Plan *plan) {
    int wide = once_in(40), large = once_in(15), convolutions = between(1, wide ? 2 : 4);
    static const int channels[] = {1, 3, 4};
    memset(plan, 0, sizeof *plan);
    plan->channels = once_in(20) ? between(1, 17) : channels[between(0, 2)];
    plan->height = between(5, 20), plan->width = between(5, 20), plan->batch = between(1, wide ? 3 : 13);
    int height = plan->height, width = plan->width, inputs = plan->channels;
    for (int i = 0; i < convolutions; i++) {
        int32_t *layer = plan->spec[plan->layers++];
        int square = !once_in(3), kernel = large ? between(1, 16) : once_in(2) ? 3 : between(1, 5);
        layer[1] = inputs, layer[2] = once_in(3) ? 8 * between(1, 8) : between(1, once_in(3) ? 70 : 20);
        if (wide) layer[2] = between(150, 400);
        layer[3] = kernel, layer[4] = square ? kernel : between(1, large ? 16 : 5);
        layer[5] = between(0, 2), layer[6] = once_in(2) ? layer[5] : between(0, 2);
        layer[7] = between(1, 2), layer[8] = between(0, 1);
        long input = (long)(inputs + 7) * (height + 2 * layer[5]) * (width + 2 * layer[6]) * plan->batch * 4;
        height += 2 * layer[5] - layer[3] + 1, width += 2 * layer[6] - layer[4] + 1;
        if (height < layer[7] || width < layer[7] || input >= 1L << 31) return 0;
        height /= layer[7], width /= layer[7];
        layer[9] = way(i, layer, height * layer[7], width * layer[7]);
        plan->parameters += (long)layer[2] * (layer[1] * layer[3] * layer[4] + 1);
        inputs = layer[2];
    }
    plan->outputs = (long)inputs * height * width;
    plan->linear = !once_in(6);
    int linear = plan->linear ? between(1, 3) : 0;
    for (int i = 0; i < linear; i++) {
        int32_t *layer = plan->spec[plan->layers++];
        layer[0] = 1, layer[1] = (int32_t)plan->outputs, layer[2] = between(1, 70);
        layer[7] = 1, layer[8] = i + 1 < linear ? between(0, 1) : once_in(8), layer[9] = AUTOMATIC;
        plan->parameters += (long)layer[2] * (layer[1] + 1);
        plan->outputs = layer[2];
    }
    return plan->parameters < 4000000;
}

static void describe(const Plan *plan, uint64_t number, int kind) {
    fprintf(stderr, "chain %llu: batch %d of %dx%dx%d, weights %d:", (unsigned long long)number, plan->batch,
            plan->height, plan->width, plan->channels, kind);
    for (int i = 0; i < plan->layers; i++) {
        fprintf(stderr, " (");
        for (int j = 0; j < SPEC; j++) fprintf(stderr, j ? " %d" : "%d", (int)plan->spec[i][j]);
        fprintf(stderr, ")");
    }
    fprintf(stderr, "\n");
}

/* Images at least as large as the chain sees, and which of them in which order. */
typedef struct {
    int images, height, width, count;
    uint8_t *bytes;
    int64_t *index, *labels;
    int32_t *crops;
} Data;

static Data make_data(const Plan *plan, int count) {
    Data data = {.images = between(1, 4), .count = count};
    int larger = once_in(3);
    data.height = plan->height + (larger ? between(0, 3) : 0), data.width = plan->width + (larger ? between(0, 3) : 0);
    size_t size = (size_t)data.images * (size_t)data.height * (size_t)data.width * (size_t)plan->channels;
    data.bytes = exactly(size);
    for (size_t i = 0; i < size; i++) data.bytes[i] = (uint8_t)draw();
    data.index = exactly(sizeof(int64_t) * (size_t)count), data.labels = exactly(sizeof(int64_t) * (size_t)count);
    if (once_in(2)) data.crops = exactly(sizeof(int32_t) * 3 * (size_t)count);
    int far = once_in(10);
    for (int i = 0; i < count; i++) {
        data.index[i] = between(0, data.images - 1), data.labels[i] = between(0, (int)plan->outputs - 1);
        if (!data.crops) continue;
        int32_t *crop = data.crops + 3 * i;
        crop[0] = far ? between(-(1 << 20), 1 << 20) : between(-4, 4);
        crop[1] = far ? between(-(1 << 20), 1 << 20) : between(-4, 4);
        crop[2] = between(0, 1);
    }
    return data;
}

static void free_data(Data *data) { free(data->bytes), free(data->index), free(data->labels), free(data->crops); }

static void outputs(Chain *chain, const Plan *plan, const Data *data, const float *parameters) {
    float *found = unset(data->count * plan->outputs);
    fdm_outputs(chain, data->count, data->bytes, data->height, data->width, data->index, data->crops, parameters, found);
    look(found, data->count * plan->outputs);
}

static void backward(Chain *chain, const Plan *plan, int count, int kind, const float *parameters) {
    float *given = floats(count * plan->outputs, kind, 1), *grads = unset(plan->parameters);
    fdm_backward(chain, count, given, parameters, grads);
    look(grads, plan->parameters), free(given);
}

static void gradients(Chain *chain, const Plan *plan, const Data *data, float scale, const float *parameters) {
    float *grads = unset(plan->parameters), *shift = once_in(2) ? floats(plan->outputs, between(0, KINDS - 1), 5) : NULL;
    kept = fdm_gradients(chain, data->count, data->bytes, data->height, data->width, data->index, data->crops,
                         data->labels, shift, scale, parameters, grads);
    look(grads, plan->parameters), free(shift);
}

static void products(Chain *chain, const Plan *plan, const Data *data, int kind, const float *parameters) {
    float scale = 1.0f / (float)(data->count + 3);
    gradients(chain, plan, data, scale, parameters);
    if (!fdm_hessian_start(chain, data->count)) exit(2);
    for (int i = 0; i < 2; i++) {
        float *direction = floats(plan->parameters, kind, 1), *product = unset(plan->parameters);
        fdm_hessian_product(chain, data->count, scale, parameters, direction, product);
        look(product, plan->parameters), free(direction);
    }
}

static void run(const Plan *plan, int kind) {
    int32_t *spec = exactly(sizeof(int32_t) * SPEC * (size_t)plan->layers);
    memcpy(spec, plan->spec, sizeof(int32_t) * SPEC * (size_t)plan->layers);
    Chain *chain = fdm_create(plan->layers, spec, plan->batch, plan->height, plan->width);
    free(spec);
    if (!chain) exit(2);
    for (int turn = 0; turn < 2; turn++) {
        float *parameters = floats(plan->parameters, turn ? PLAIN : kind, 0.3f);
        for (int call = 0; call < 3; call++) {
            int what = plan->linear ? between(0, 3) : 0;
            Data data = make_data(plan, between(1, what ? plan->batch : 2 * plan->batch + 3));
            if (what <= 1) outputs(chain, plan, &data, parameters);
            if (what == 1) backward(chain, plan, data.count, between(0, KINDS - 1), parameters);
            if (what == 2) gradients(chain, plan, &data, once_in(2) ? 0 : uniform(), parameters);
            if (what == 3) products(chain, plan, &data, between(0, KINDS - 1), parameters);
            free_data(&data);
        }
        free(parameters);
    }
    fdm_destroy(chain);
}

int main(int count, char **given) {
    if (count != 3) {
        fprintf(stderr, "usage: fuzz SEED CHAINS\n");
        return 2;
    }
    uint64_t seed = strtoull(given[1], NULL, 10);
    long chains = strtol(given[2], NULL, 10), convolutions = 0, ways[4] = {0};
    for (long i = 0; i < chains; i++) {
        Plan plan;
        state = (seed + (uint64_t)i) * 0x2545f4914f6cdd1du;
        while (!make_plan(&plan)) continue;
        int kind = once_in(2) ? PLAIN : between(0, KINDS - 1);
        describe(&plan, seed + (uint64_t)i, kind);
        run(&plan, kind);
        for (int j = 0; j < plan.layers; j++)
            if (plan.spec[j][0] == 0) convolutions++, ways[plan.spec[j][9] + 1]++;
    }
    fdm_destroy(NULL);
    printf("version %d: %ld chains, %ld convolutions (%ld automatic, %ld direct, %ld Winograd, %ld dots)\n", fdm_version(),
           chains, convolutions, ways[0], ways[1], ways[2], ways[3]);
    return 0;
}

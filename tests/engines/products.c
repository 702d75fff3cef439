/* Products of rows with weights that `palaver_pack` has packed, for test_products.py. */

#include <stdlib.h>

#include "products.h"

/* y = x * weights, [rows][outputs in whole panels]. Returns 0 without memory. */
int multiply_rows(int64_t dtype, const void *packed, int64_t inputs, int64_t outputs, const float *x, int64_t rows,
                  float *y) {
    const matrix by = {packed, NULL, inputs, outputs, dtype};
    const int64_t size = rows * rounded_groups(inputs) * sizeof(rounded_group);
    rounded_group *integers = aligned_alloc(ALIGNMENT, (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    float *tile = aligned_alloc(ALIGNMENT, rows * PANEL * sizeof(float));
    if (integers && tile) {
        for (int64_t r = 0; is_quantised(dtype) && r < rows; r++)
            round_row(x + r * inputs, inputs, integers + r * rounded_groups(inputs));
        for (int64_t panel = 0; panel < panel_count(outputs); panel++) {
            multiply_panel(&by, panel, rows, &(row_numbers){x, inputs, integers}, tile);
            for (int64_t r = 0; r < rows; r++)
                memcpy(y + r * panel_count(outputs) * PANEL + panel * PANEL, tile + r * PANEL, PANEL * sizeof(float));
        }
    }
    int done = integers && tile;
    free(integers), free(tile);
    return done;
}

void read_weights(int64_t dtype, const void *packed, int64_t inputs, int64_t outputs, int64_t output, float *y) {
    const matrix by = {packed, NULL, inputs, outputs, dtype};
    read_output(&by, output, y);
}

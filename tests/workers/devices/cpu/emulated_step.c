/* Runs one step of the CPU engine on an emulated processor, over memory that it shares with a test:
 *
 *     emulated_step FILE ADDRESS SIZE CONTROL
 *
 * maps FILE where the test has it mapped, and leads the step whose control block lies at CONTROL.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

int32_t ds4_cpu_step(int64_t *result, int64_t *exception, int64_t control, int64_t thread);

int main(int argc, char **argv) {
    if (argc != 5)
        return 2;
    void *address = (void *)strtoull(argv[2], NULL, 0);
    int file = open(argv[1], O_RDWR);
    void *mapped = mmap(address, strtoull(argv[3], NULL, 0), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_FIXED_NOREPLACE, file, 0);
    if (mapped != address)
        return 3;
    int64_t result = 0, exception = 0;
    return ds4_cpu_step(&result, &exception, strtoll(argv[4], NULL, 0), 0) == 0 ? 0 : 4;
}

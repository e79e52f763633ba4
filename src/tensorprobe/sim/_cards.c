/* The current device of a thread, as torch's C++ code asks a device guard for it: by four functions of a table of virtual
 * functions. torch lets a guard be written in Python, but then says that there is one device. Stable ABI.
 *
 * The functions know nothing of Python: torch calls them without its lock, and while an exception is pending.
 */
#include <Python.h>
#include <stdint.h>

#define CARDS 16
#define PRIVATE_USE_1 20

typedef struct {
    int8_t type, index;
} Device;

static _Thread_local int8_t current;

static Device get_device(const void *self) {
    (void)self;
    return (Device){PRIVATE_USE_1, current};
}

static void set_device(const void *self, Device device) {
    (void)self;
    if (device.index >= 0) current = device.index;
}

static Device exchange_device(const void *self, Device device) {
    Device before = get_device(self);
    set_device(self, device);
    return before;
}

static int8_t device_count(const void *self) {
    (void)self;
    return CARDS;
}

static PyObject *addresses(PyObject *self, PyObject *nothing) {
    (void)self, (void)nothing;
    return Py_BuildValue("{s:K,s:K,s:K,s:K}", "exchange", (unsigned long long)(uintptr_t)exchange_device, "get",
                         (unsigned long long)(uintptr_t)get_device, "set", (unsigned long long)(uintptr_t)set_device, "count",
                         (unsigned long long)(uintptr_t)device_count);
}

static PyObject *exchange(PyObject *self, PyObject *index) {
    (void)self;
    long wanted = PyLong_AsLong(index);
    if (wanted == -1 && PyErr_Occurred()) return NULL;
    int8_t before = current;
    if (wanted >= 0 && wanted < CARDS) current = (int8_t)wanted;
    return PyLong_FromLong(before);
}

static PyMethodDef methods[] = {
    {"addresses", addresses, METH_NOARGS, "Where the four functions are that a table of virtual functions needs."},
    {"exchange", exchange, METH_O, "Make this the current device of the thread and return the one before; -1 changes nothing."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cards", "The current device.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__cards(void) {
    PyObject *made = PyModule_Create(&module);
    if (made != NULL && PyModule_AddIntConstant(made, "CARDS", CARDS) < 0) return NULL;
    return made;
}

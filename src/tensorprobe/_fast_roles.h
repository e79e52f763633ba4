/* The roles of tensors: which of them are parameters, gradients, buffers or states of an optimizer. training.py does the same.
 *
 * What is known of a tensor is a tuple: (state, key, role), or (weak reference to a module, key, name, whether it is the
 * gradient, whether it is a buffer, role). An address may be that of another tensor by now: the owner is asked whether it
 * still holds this one.
 */
static PyObject *s_parameters, *s_buffers, *s_grad, *s_is_leaf, *s_role;

enum { KEPT_WIDTH = 3, OWNED_WIDTH = 6 };

/* Whether a module still holds the tensor: 1 or 0, -1 on error. */
static int module_holds(PyObject *known, PyObject *tensor) {
    PyObject *module = PyObject_CallFunctionObjArgs(PyTuple_GetItem(known, 0), NULL);
    if (module == NULL || module == Py_None) {
        Py_XDECREF(module);
        return module == NULL ? -1 : 0;
    }
    PyObject *all = PyObject_GetAttr(module, PyTuple_GetItem(known, 4) == Py_True ? s_buffers : s_parameters);
    Py_DECREF(module);
    PyObject *held = all != NULL && PyDict_Check(all) ? PyDict_GetItemWithError(all, PyTuple_GetItem(known, 1)) : NULL;
    Py_XINCREF(held);
    Py_XDECREF(all);
    int holds = held == tensor;
    if (held != NULL && PyTuple_GetItem(known, 3) == Py_True) {
        holds = held == Py_None ? 0 : is_true(PyObject_GetAttr(held, s_is_leaf)); /* of one that is no leaf torch would warn */
        PyObject *gradient = holds == 1 ? PyObject_GetAttr(held, s_grad) : NULL;
        if (holds == 1) holds = gradient == tensor;
        Py_XDECREF(gradient);
    }
    Py_XDECREF(held);
    return PyErr_Occurred() ? -1 : holds;
}

/* The role of a tensor (borrowed from `known`), NULL when its owner does not hold it any more, or on error. */
static PyObject *role_in(PyObject *known, PyObject *tensor) {
    if (known == NULL || !PyTuple_Check(known)) return NULL;
    if (PyTuple_Size(known) == OWNED_WIDTH) return module_holds(known, tensor) == 1 ? PyTuple_GetItem(known, 5) : NULL;
    if (PyTuple_Size(known) != KEPT_WIDTH || !PyDict_Check(PyTuple_GetItem(known, 0))) return NULL;
    return PyDict_GetItemWithError(PyTuple_GetItem(known, 0), PyTuple_GetItem(known, 1)) == tensor ? PyTuple_GetItem(known, 2) : NULL;
}

/* Write the role of one tensor into its slot; `found` is what is known of it, or NULL. 1 when it has none, 0, -1 on error. */
static int write_role(PyObject *found, PyObject *tensor, PyObject *slot) {
    Py_XINCREF(found); /* an owner that is asked may forget it */
    PyObject *role = role_in(found, tensor);
    const int failed = PyErr_Occurred() || (role != NULL && PyObject_SetAttr(slot, s_role, role));
    Py_XDECREF(found);
    return failed ? -1 : role == NULL;
}

/* The second table for a tensor that the first does not know. It is asked for again for the first tensor that it lacks: it may have
 * grown. A new reference takes the place of `others`; 0, or -1 on error. */
static int look_outside(PyObject *outside, PyObject *key, PyObject **others, int *lacked) {
    if (*others != NULL && (*lacked || PyDict_GetItemWithError(*others, key) != NULL)) return 0;
    PyObject *table = PyObject_CallFunctionObjArgs(outside, key, NULL);
    if (table != NULL && !PyDict_Check(table)) {
        Py_DECREF(table);
        PyErr_SetString(PyExc_TypeError, "the second table is a dict");
        table = NULL;
    }
    if (table == NULL) return -1;
    Py_XDECREF(*others);
    *others = table;
    *lacked = PyDict_GetItemWithError(table, key) == NULL;
    return PyErr_Occurred() ? -1 : 0;
}

/* mark(known, outside, tensors, slots): `outside(key)` gives a second table; None when there is none. */
static PyObject *mark_roles(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (nargs != 4 || !PyDict_Check(args[0]) || !PyList_Check(args[2]) || !PyList_Check(args[3])) {
        PyErr_SetString(PyExc_TypeError, "mark(dict, function or None, list of (name, tensor), list of slots)");
        return NULL;
    }
    PyObject *others = NULL;
    int failed = 0, lacked = 0;
    for (Py_ssize_t i = 0; !failed && i < PyList_Size(args[2]) && i < PyList_Size(args[3]); i++) {
        PyObject *pair = PyList_GetItem(args[2], i), *slot = PyList_GetItem(args[3], i);
        if (!PyTuple_Check(pair) || PyTuple_Size(pair) != 2) continue;
        Py_INCREF(pair);
        Py_INCREF(slot);
        PyObject *tensor = PyTuple_GetItem(pair, 1), *key = PyLong_FromVoidPtr(tensor);
        int left = key == NULL ? -1 : write_role(PyDict_GetItemWithError(args[0], key), tensor, slot);
        if (left == 1 && args[1] != Py_None) {
            left = look_outside(args[1], key, &others, &lacked);
            if (!left) left = write_role(PyDict_GetItemWithError(others, key), tensor, slot);
        }
        failed = left < 0;
        Py_XDECREF(key);
        Py_DECREF(slot);
        Py_DECREF(pair);
    }
    Py_XDECREF(others);
    if (failed) return NULL;
    Py_RETURN_NONE;
}
